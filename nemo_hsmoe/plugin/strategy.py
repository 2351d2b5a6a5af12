"""NeMo's Megatron strategy with this plugin's checkpoint fixes."""

from collections.abc import Mapping
from typing import Any, Optional

import torch
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from nemo.lightning import MegatronStrategy
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

from nemo_hsmoe.plugin import compat
from nemo_hsmoe.plugin.optim import allocate_adam_states
from nemo_hsmoe.runtime import cpu
from nemo_hsmoe.runtime.errors import require


class AsyncCheckpointIO(AsyncFinalizableCheckpointIO):
    """NeMo's asynchronous checkpoint writer; its own constructor looks for a Megatron module that 0.16 removed."""

    def __init__(self, checkpoint_io: MegatronCheckpointIO):
        _WrappingCheckpointIO.__init__(self, checkpoint_io)
        self.async_calls_queue = AsyncCallsQueue()


class HybridSparseMoEStrategy(MegatronStrategy):
    """Megatron strategy for expert- and data-parallel training on CUDA or CPU.

    Gradients are summed in float32 and divided by the valid tokens of the global batch; optimizer states are sharded over
    the data-parallel ranks.

    Args:
        seed: seed of Megatron's random-number tracker.
        overlap_grad_reduce: reduce gradients while backward goes on.
        overlap_param_gather: gather updated parameters while forward goes on.
        check_for_nan_in_grad: stop with an error when a gradient is not finite.
        ckpt_optim_fully_reshardable: keep optimizer states loadable at any expert- and data-parallel size.
        arguments: `nemo.lightning.MegatronStrategy`'s, `ddp` excepted.
    """

    def __init__(
        self,
        *,
        seed: int = 1234,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        check_for_nan_in_grad: bool = False,
        ckpt_optim_fully_reshardable: bool = True,
        **arguments: Any,
    ):
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            check_for_nan_in_grad=check_for_nan_in_grad,
            average_in_collective=False,
            use_distributed_optimizer=True,
        )
        super().__init__(ddp=ddp, ckpt_optim_fully_reshardable=ckpt_optim_fully_reshardable, **arguments)
        self.tracker_seed = seed

    def connect(self, model) -> None:
        """Copy parallelism into the model's configuration, which checks it."""
        processes = self.num_nodes * self.num_processes
        require(
            processes % self.expert_model_parallel_size == 0,
            "expert_model_parallel_size",
            self.expert_model_parallel_size,
            f"needs a divisor of the number of processes, {processes}",
        )
        super().connect(model)

    def setup_environment(self) -> None:
        """Prepare the process; on a machine without CUDA, Megatron is told so."""
        cpu.install()
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Make process groups and, without CUDA, the random-number tracker that NeMo seeds only with it."""
        super().setup_distributed()
        if not torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(self.tracker_seed)

    @property
    def checkpoint_io(self) -> MegatronCheckpointIO | AsyncCheckpointIO:
        """The checkpoint writer, made on first use."""
        if not self._checkpoint_io:
            writer = MegatronCheckpointIO(
                save_ckpt_format=self.save_ckpt_format,
                async_save=self.async_save,
                torch_dist_multiproc=self.torch_dist_multiproc,
                assume_constant_structure=self.assume_constant_structure,
                parallel_save=self.parallel_save,
                parallel_save_within_dp=self.parallel_save_within_dp,
                parallel_load=self.parallel_load,
                load_directly_on_device=self.load_directly_on_device,
            )
            self._checkpoint_io = AsyncCheckpointIO(writer) if self.async_save else writer
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io) -> None:
        self._checkpoint_io = io

    def validation_step(self, dataloader_iter, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Validate on one global batch; `val_loss` is the mean over all valid tokens of all batches."""
        with self.precision_plugin.val_step_context():
            loss = self.model.validation_step(dataloader_iter, *args, **kwargs)
        module = self.lightning_module
        valid_tokens = module.validation_loss_reduction.valid_tokens
        module.log("val_loss", loss, prog_bar=True, on_epoch=True, batch_size=valid_tokens)
        return loss

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath, storage_options: Optional[Any] = None) -> None:
        """Write a distributed checkpoint."""
        compat.start_checkpoint_queue()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_sharded_state_dict(self, is_loading: bool = False, metadata: Optional[dict] = None):
        """Optimizer states as sharded tensors, allocated first when they are about to be loaded."""
        if is_loading and not HAVE_APEX_OR_TE:
            optimizer = self.lightning_module.optimizers(use_pl_optimizer=False)
            allocate_adam_states(optimizer.mcore_optimizer)
        return super().optimizer_sharded_state_dict(is_loading=is_loading, metadata=metadata)

    @torch.no_grad()
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], selective_restore: bool = False) -> None:
        """Load optimizer states; Megatron copies into float32 parameters in place."""
        super().load_optimizer_state_dict(checkpoint, selective_restore=selective_restore)
