"""`save_checkpoint` and `load_checkpoint`: one file, any expert parallelism."""

import os

import pytest
import torch

from tests.processes import run_in_processes

STEP = 3


def trained(directory, resume_from=None, stop_at=6):
    from nemo_hsmoe import HybridSparseMoEModel, load_checkpoint, save_checkpoint
    from nemo_hsmoe.model.sizes import config_for
    from nemo_hsmoe.runtime.process_groups import ensure_model_parallel

    world = int(os.environ["WORLD_SIZE"])
    ensure_model_parallel(world)
    config = config_for("hsmoe_tiny", vocab_size=512, seq_length=32, expert_model_parallel_size=world)
    model = HybridSparseMoEModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
    step = 0 if resume_from is None else load_checkpoint(resume_from, model, optimizer, scheduler)
    losses = []
    while step < stop_at:
        ids = torch.randint(0, 512, (4, 33), generator=torch.Generator().manual_seed(step))
        loss = model(ids[:, :-1], labels=ids[:, 1:].contiguous()) / ids[:, 1:].numel()
        loss.backward()
        for parameter in model.parameters():
            if world > 1 and not getattr(parameter, "allreduce", True):
                parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss))
        step += 1
        if step == STEP and resume_from is None:
            save_checkpoint(model, optimizer, scheduler, step, directory)
    return losses


@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 1), (2, 4)])
def test_training_goes_on_as_if_nothing_had_happened(before, after, tmp_path):
    unbroken = run_in_processes(trained, before, str(tmp_path))[0]
    path = tmp_path / f"checkpoint_{STEP}.pt"
    content = torch.load(path, weights_only=True)
    assert {"model", "optimizer", "scheduler"} <= set(content)
    assert content["model"]["decoder.layers.0.mlp.experts.fc1_weight"].shape[0] == 64
    resumed = run_in_processes(trained, after, str(tmp_path), str(path))[0]
    tolerance = 0 if before == after else 1e-5
    assert resumed == pytest.approx(unbroken[STEP:], rel=tolerance, abs=0)


def test_damaged_missing_and_foreign_files(tmp_path, model_parallel):
    from nemo_hsmoe import ConfigurationError, HybridSparseMoEModel, load_checkpoint, save_checkpoint
    from nemo_hsmoe.model.sizes import config_for

    model = HybridSparseMoEModel(config_for("hsmoe_tiny", vocab_size=64))
    path = save_checkpoint(model, None, None, 1, tmp_path)
    assert load_checkpoint(path, model) == 1
    with pytest.raises(ConfigurationError, match="fc1_weight is"):
        load_checkpoint(path, HybridSparseMoEModel(config_for("hsmoe_tiny", vocab_size=64, moe_ffn_hidden_size=16)))
    with pytest.raises(ConfigurationError, match="optimizer='given'"):
        load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))
    path.write_bytes(path.read_bytes()[:5000])
    for broken in (path, tmp_path / "absent.pt"):
        with pytest.raises(ConfigurationError, match="needs a complete checkpoint file"):
            load_checkpoint(broken, model)
    assert not list(tmp_path.glob("*.unfinished"))
    foreign = tmp_path / "foreign.pt"
    for content in ({"a": 1}, [1, 2], {"model": {}}):
        torch.save(content, foreign)
        with pytest.raises(ConfigurationError, match="needs a file written by save_checkpoint"):
            load_checkpoint(foreign, model)
    foreign.write_text("not a checkpoint")
    with pytest.raises(ConfigurationError, match="needs a complete checkpoint file"):
        load_checkpoint(foreign, model)


def test_a_refused_file_changes_nothing(tmp_path, model_parallel):
    from nemo_hsmoe import ConfigurationError, HybridSparseMoEModel, load_checkpoint, save_checkpoint
    from nemo_hsmoe.model.sizes import config_for

    path = save_checkpoint(HybridSparseMoEModel(config_for("hsmoe_tiny", vocab_size=64)), None, None, 1, tmp_path / "new")
    other = HybridSparseMoEModel(config_for("hsmoe_tiny", vocab_size=64, num_shared_experts=4, init_seed=5))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items() if isinstance(tensor, torch.Tensor)}
    with pytest.raises(ConfigurationError, match="needs a checkpoint of this architecture"):
        load_checkpoint(path, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items() if name in before)
