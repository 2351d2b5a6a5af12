import math

import pytest
import torch

from nemo_hsmoe import HybridSparseMoEConfig, HybridSparseMoEModel, parameter_report
from nemo_hsmoe.model.experts import ExpertWeights
from nemo_hsmoe.model.router import routers_of
from nemo_hsmoe.model.sizes import config_for
from nemo_hsmoe.runtime.errors import ConfigurationError

SMALL = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    moe_ffn_hidden_size=16,
    shared_expert_ffn_hidden_size=8,
    dense_ffn_hidden_size=16,
    vocab_size=200,
    seq_length=64,
)
pytestmark = pytest.mark.usefixtures("model_parallel")


def small_model(**fields) -> HybridSparseMoEModel:
    return HybridSparseMoEModel(HybridSparseMoEConfig(**{**SMALL, **fields}))


def random_ids(batch=2, length=24):
    torch.manual_seed(0)
    return torch.randint(0, 200, (batch, length))


def test_users_constructor_and_call():
    model = HybridSparseMoEModel(
        num_layers=1,
        hidden_dim=48,
        num_attention_heads=2,
        num_routed_experts=8,
        num_shared_experts=2,
        expert_router_k=2,
        vocab_size=100,
        max_seq_len=32,
        dropout=0.0,
    )
    logits, routing = model(torch.randint(0, 100, (3, 16)))
    assert logits.shape == (3, 16, 100)
    assert routing.scores_LBSE.shape == (1, 3, 16, 8)
    assert routing.tokens_per_expert_LE.sum() == 3 * 16 * 2
    torch.testing.assert_close(routing.scores_LBSE.sum(dim=-1), torch.ones(1, 3, 16))


def test_causality():
    model = small_model().eval()
    ids = random_ids()
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 200
    torch.testing.assert_close(model(ids)[0][:, :12], model(changed)[0][:, :12], rtol=1e-4, atol=1e-6)


def test_layer_is_the_sum_of_its_branches():
    model = small_model()
    layer = model.decoder.layers[0].mlp
    hidden = torch.randn(6, 2, 32)
    flat = hidden.reshape(-1, 32)
    gates, _ = layer.router(hidden)
    routed = torch.zeros_like(flat)
    experts = layer.experts
    for expert in range(64):
        inner = torch.nn.functional.gelu(flat @ experts.fc1_weight[expert].T + experts.fc1_bias[expert])
        out = inner @ experts.fc2_weight[expert].T + experts.fc2_bias[expert]
        routed += gates[:, expert, None] * out
    shared_weights = layer.shared_experts
    shared = sum(
        torch.nn.functional.gelu(flat @ shared_weights.fc1_weight[expert].T + shared_weights.fc1_bias[expert])
        @ shared_weights.fc2_weight[expert].T
        + shared_weights.fc2_bias[expert]
        for expert in range(8)
    )
    gate, up = (flat @ layer.dense.linear_fc1.weight.T).chunk(2, dim=-1)
    dense = (torch.nn.functional.silu(gate) * up) @ layer.dense.linear_fc2.weight.T
    output, _ = layer(hidden)
    torch.testing.assert_close(output.reshape(-1, 32), routed + shared + dense, rtol=1e-4, atol=1e-6)


def test_attention_has_separate_square_projections_without_biases():
    names = {name for name, _ in small_model().decoder.layers[0].self_attention.named_parameters()}
    assert names == {f"linear_{part}.weight" for part in ("q", "k", "v", "proj")}


def test_initial_values_follow_the_specification():
    model = HybridSparseMoEModel(config_for("hsmoe_tiny", hidden_size=128, moe_ffn_hidden_size=64))
    parameters = dict(model.named_parameters())
    assert float(parameters["embedding.word_embeddings.weight"].std()) == pytest.approx(0.02, rel=0.01)
    assert float(parameters["decoder.layers.0.mlp.experts.fc1_weight"].std()) == pytest.approx(0.0025, rel=0.01)
    assert float(parameters["decoder.layers.1.mlp.shared_experts.fc2_weight"].std()) == pytest.approx(0.0025, rel=0.05)
    assert float(parameters["decoder.layers.0.mlp.router.weight"].std()) == pytest.approx(1.0, rel=0.05)
    bound = math.sqrt(6 / 256)
    query = parameters["decoder.layers.0.self_attention.linear_q.weight"]
    assert 0.98 * bound < float(query.abs().max()) <= bound
    bound = math.sqrt(6 / (128 + 64))
    assert 0.98 * bound < float(parameters["decoder.layers.0.mlp.dense.linear_fc1.weight"].abs().max()) <= bound
    assert all(not parameter.any() for name, parameter in parameters.items() if name.endswith("bias"))
    assert all((parameter == 1).all() for name, parameter in parameters.items() if "norm" in name)
    draws = {
        float(weight.sum()) for layer in (0, 1) for weight in parameters[f"decoder.layers.{layer}.mlp.experts.fc1_weight"]
    }
    assert len(draws) == 128


def test_router_bias_and_seed_are_configurable():
    assert (small_model(router_bias_init=-0.5).decoder.layers[0].mlp.router.bias == -0.5).all()
    first, same, other = small_model(), small_model(), small_model(init_seed=7)
    weights = [model.embedding.word_embeddings.weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_router_embedding_and_calibrated_ranges_stay_float32_after_mixed_precision_wrapping(cast):
    from megatron.core.transformer.module import Float16Module

    model = small_model(bf16=cast == "bfloat16", fp16=cast == "half")
    wrapped = Float16Module(model.config, model)
    narrow = torch.bfloat16 if cast == "bfloat16" else torch.float16
    for name, tensor in (*wrapped.named_parameters(), *wrapped.named_buffers()):
        if "router" in name or "word_embeddings" in name or name.endswith("calibrated_amax"):
            assert tensor.dtype == torch.float32, name
        elif "rotary" not in name:
            assert tensor.dtype == narrow, name
    if cast == "bfloat16":
        loss = wrapped(random_ids(), labels=random_ids())
        loss.backward()
        assert loss.dtype == torch.float32
        assert model.decoder.layers[0].mlp.router.weight.grad.dtype == torch.float32


def test_padding_changes_nothing_before_it():
    model = small_model().train()
    ids = random_ids(1, 24)
    padding = torch.zeros(1, 24, dtype=torch.bool)
    padding[:, 16:] = True
    mask = (~padding).float()
    model(ids, labels=ids.roll(-1, 1), loss_mask=mask, padding_mask=padding).backward()
    padded = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    counted = [router.expert_load.sum().item() for router in routers_of(model)]
    model.zero_grad()
    model(ids[:, :16], labels=ids.roll(-1, 1)[:, :16]).backward()
    assert counted == [16 * 4] * 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(padded[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_all_tokens_to_one_expert_trains_with_exact_zero_gradients_elsewhere():
    model = small_model(moe_router_topk=1).train()
    for router in routers_of(model):
        router.balance_bias[5] = 1e6
    loss = model(random_ids(), labels=random_ids())
    loss.backward()
    assert loss.isfinite()
    for module in model.modules():
        if isinstance(module, ExpertWeights) and module.is_expert_parallel:
            grad = module.fc1_weight.grad
            assert grad[5].any()
            assert not grad[:5].any()
            assert not grad[6:].any()


def test_no_valid_token_gives_loss_zero_and_zero_gradients():
    model = small_model()
    loss = model(random_ids(), labels=random_ids(), loss_mask=torch.zeros(2, 24))
    loss.backward()
    assert float(loss) == 0.0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_loss_equals_cross_entropy_of_the_logits():
    model = small_model()
    ids, labels = random_ids(), random_ids().roll(-1, 1)
    logits, _ = model(ids)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, labels=labels), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"hidden_size": 33}, "hidden_size=33: needs a multiple of 2 × num_attention_heads"),
        ({"moe_router_topk": 65}, "moe_router_topk=65: needs at most num_moe_experts = 64"),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size=3: needs a divisor of the 64 routed experts"),
        ({"shared_expert_placement": "both"}, "shared_expert_placement='both'"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2: needs 1"),
        ({"balance_bias_update_rate": -1.0}, "balance_bias_update_rate=-1.0"),
    ],
)
def test_bad_configuration_is_named_in_one_line(fields, message):
    with pytest.raises(ConfigurationError) as error:
        HybridSparseMoEConfig(**{**SMALL, **fields})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_sequence_longer_than_the_context():
    with pytest.raises(ConfigurationError, match="needs at most seq_length = 64"):
        small_model()(torch.zeros(1, 65, dtype=torch.long))


def test_configuration_beside_shape_arguments():
    with pytest.raises(ConfigurationError, match="excludes num_layers"):
        HybridSparseMoEModel(HybridSparseMoEConfig(**SMALL), num_layers=3)


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [
        ("hsmoe_5b", 4_978_768_896, 814_648_320),
        ("hsmoe_33b", 33_733_585_920, 6_346_435_584),
        ("hsmoe_1b", 993_963_776, 135_776_000),
        ("hsmoe_tiny", 9_125_696, 166_592),
    ],
)
def test_parameter_totals(size, total, active):
    report = parameter_report(config_for(size))
    assert (report.total, report.active) == (total, active)


def test_five_billion_on_the_meta_device_counts_the_same():
    config = config_for("hsmoe_5b", use_cpu_initialization=True)
    with torch.device("meta"):
        model = HybridSparseMoEModel(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert parameter_report(model) == parameter_report(config)
    assert 4.95e9 < parameter_report(model).total < 5.05e9


def test_report_of_a_built_model_equals_that_of_its_configuration():
    model = small_model()
    assert parameter_report(model) == parameter_report(model.config)
    assert parameter_report(model).total == sum(parameter.numel() for parameter in model.parameters())


def test_branches_can_be_left_out():
    model = small_model(num_shared_experts=0, dense_ffn_hidden_size=0)
    assert not any("shared" in name or "dense" in name for name, _ in model.named_parameters())
    assert parameter_report(model) == parameter_report(model.config)
    model(random_ids(), labels=random_ids()).backward()


def test_padding_and_ignored_labels_weigh_nothing_by_default():
    model = small_model()
    ids, labels = random_ids(), random_ids().roll(-1, 1)
    padding = torch.zeros_like(ids, dtype=torch.bool)
    padding[:, 16:] = True
    expected = model(ids, labels=labels, loss_mask=(~padding).float(), padding_mask=padding)
    torch.testing.assert_close(model(ids, labels=labels, padding_mask=padding), expected)
    ignored = labels.masked_fill(padding, -100)
    torch.testing.assert_close(model(ids, labels=ignored, padding_mask=padding), expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((1, 4), 200), "needs ids from 0 to 199"),
        (torch.full((1, 4), -1), "needs ids from 0 to 199"),
        (torch.zeros(0, 4, dtype=torch.long), "not empty"),
        (torch.zeros(4, dtype=torch.long), r"needs shape \[batch, sequence\]"),
    ],
)
def test_unusable_ids_are_named(ids, message):
    with pytest.raises(ConfigurationError, match=message):
        small_model()(ids)


def test_sampling_goes_on_past_the_context():
    from nemo_hsmoe.model.sampling import sample_continuation

    model = small_model(seq_length=8)
    assert sample_continuation(model, torch.arange(6), 5).shape == (11,)
    greedy = sample_continuation(model, torch.arange(6), 2, temperature=0)
    assert greedy[6] == model(torch.arange(6)[None])[0][0, -1].argmax()
