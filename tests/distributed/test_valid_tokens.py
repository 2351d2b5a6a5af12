"""The loss is the mean over the valid tokens of the whole global batch, however they are spread."""

import os

import pytest
import torch

from tests.processes import run_in_processes


def gradients_of_uneven_batch(microbatches_per_rank):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
    from nemo_hsmoe.model.sizes import config_for
    from nemo_hsmoe.runtime.process_groups import ensure_model_parallel

    world = int(os.environ["WORLD_SIZE"])
    ensure_model_parallel(world)
    config = config_for("hsmoe_tiny", vocab_size=512, seq_length=32, expert_model_parallel_size=world)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), HybridSparseMoEModel(config)
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (4, 33))
    mask = torch.ones(4, 32)
    for row, valid in enumerate((32, 3, 0, 17)):
        mask[row, valid:] = 0
    rank = torch.distributed.get_rank()
    mine = slice(rank * 4 // world, (rank + 1) * 4 // world)
    model.zero_grad_buffer()
    tokens = torch.zeros((), dtype=torch.int)
    for part_ids, part_mask in zip(ids[mine].chunk(microbatches_per_rank), mask[mine].chunk(microbatches_per_rank)):
        padding = part_mask == 0
        model(part_ids[:, :-1], labels=part_ids[:, 1:].contiguous(), loss_mask=part_mask, padding_mask=padding).backward()
        tokens += part_mask.sum().int()
    finalize_model_grads([model], tokens)
    gathered = {}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad.clone()
        if not getattr(parameter, "allreduce", True):
            parts = [torch.empty_like(grad) for _ in range(world)]
            torch.distributed.all_gather(parts, grad, group=parallel_state.get_expert_model_parallel_group())
            grad = torch.cat(parts)
        gathered[name] = grad.numpy()
    return int(tokens), gathered


@pytest.fixture(scope="module")
def whole_batch_at_once():
    return run_in_processes(gradients_of_uneven_batch, 1, 1)[0]


@pytest.mark.parametrize(("processes", "microbatches"), [(1, 2), (1, 4), (2, 2), (4, 1)])
def test_gradients_do_not_depend_on_the_split(processes, microbatches, whole_batch_at_once):
    tokens, expected = whole_batch_at_once
    assert tokens == 52
    for total, gradients in run_in_processes(gradients_of_uneven_batch, processes, microbatches):
        assert total == 52
        for name, grad in gradients.items():
            difference = abs(grad - expected[name]).max()
            assert difference <= 1e-5 * max(1e-3, abs(expected[name]).max()), name
