"""A policy on a model: what each tensor gets, calibration, statistics, growth."""

import pytest
import torch

import nemo_hsmoe
from nemo_hsmoe import HybridSparseMoEConfig, load_checkpoint, save_checkpoint
from nemo_hsmoe.quantization import (
    PRESETS,
    TENSOR_CLASSES,
    QuantizationPolicy,
    QuantizationSpec,
    calibrate,
    discard_calibration,
    grow_blocks,
    qat_learning_rate_factor,
    quantization_report,
    quantize_model,
    quantizers_of,
    recorded_statistics,
)
from nemo_hsmoe.runtime.errors import ConfigurationError
from tests.model.test_model import SMALL, random_ids, small_model

pytestmark = pytest.mark.usefixtures("model_parallel")

RUNNABLE = [preset for preset in PRESETS if preset not in ("native", "auto")]


def policy_table(preset: str) -> dict[str, str]:
    rows = QuantizationPolicy.preset(preset).table.items()
    return {name: "none" if spec is None else spec.description for name, spec in rows}


def test_the_emulated_policy_is_the_specified_one():
    weight = "E2M1 / 8×8 / E4M3 × fp32 per matrix"
    assert policy_table("emulated") == {
        "routed_expert_weight": weight,
        "shared_expert_weight": weight,
        "dense_ffn_weight": weight,
        "attention_output_weight": weight,
        "query_key_weight": "E4M3 / 32 / E8M0",
        "value_weight": "E4M3 / 32 / E8M0",
        "query_key_output": "E4M3 / 32 / E8M0",
        "value_output": "E2M1 / 32 / E4M3 × fp32 per row",
        "attention_softmax": "UE5M3 / 32 / E8M0",
        "attention_head_output": "E4M3 / 32 / E8M0",
        "expert_output": "E2M1 / 16 / E4M3 × fp32 per row",
        "gate_preactivation": "E2M1 / 16 / E4M3 × fp32 per row",
        "router_logits": "none",
        "gradient": "none",
    }
    table = QuantizationPolicy.preset("emulated").table
    activations = ("query_key_output", "value_output", "attention_head_output", "expert_output", "gate_preactivation")
    assert all(table[name].scale_limits == (1e-6, 10.0) for name in activations)
    assert table["routed_expert_weight"].bits_per_value == 4.125
    assert table["expert_output"].bits_per_value == 4.5
    assert table["query_key_weight"].bits_per_value == 8.25


def test_auto_emulates_where_the_chip_has_no_fp4():
    assert QuantizationPolicy.preset("auto").name == ("emulated" if not _is_blackwell() else "native")


def _is_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


@pytest.mark.parametrize("preset", RUNNABLE)
def test_every_preset_trains_and_reports(preset):
    model = small_model(quantization=preset).train()
    loss = model(random_ids(), labels=random_ids().roll(-1, 1))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    report = quantization_report(model)
    assert [row.tensor_class for row in report.rows] == [*TENSOR_CLASSES, "router_weight", "embedding"]
    assert not report.dropped
    asked = {name for name, spec in QuantizationPolicy.preset(preset).table.items() if spec is not None}
    assert {row.tensor_class for row in report.rows if row.quantized} == asked
    assert all(row.high_precision == 0 for row in report.rows if row.tensor_class in asked)


def test_quantisation_changes_the_forward_pass_and_no_parameter():
    plain, quantized = small_model().eval(), small_model(quantization="emulated").eval()
    for (name, parameter), other in zip(plain.named_parameters(), quantized.parameters()):
        assert torch.equal(parameter, other), name
    ids = random_ids()
    difference = (plain(ids)[0] - quantized(ids)[0]).norm() / plain(ids)[0].norm()
    assert 0.001 < difference < 0.5
    quantize_model(quantized, policy=QuantizationPolicy.preset("none"))
    assert torch.equal(plain(ids)[0], quantized(ids)[0])


def test_users_signature():
    model = nemo_hsmoe.quantize_model(
        small_model(), weight_format="NVFP4_8x8", activation_format="NVFP4", attention_format="MXFP8"
    )
    emulated = policy_table("emulated")
    rows = {row.tensor_class: row.format for row in quantization_report(model).rows}
    assert {name: rows[name] for name in TENSOR_CLASSES} == emulated
    only_weights = nemo_hsmoe.quantize_model(small_model(), "E1M3_16x16", "none", "none")
    quantized = {row.tensor_class for row in quantization_report(only_weights).rows if row.quantized}
    assert quantized == {"routed_expert_weight", "shared_expert_weight", "dense_ffn_weight", "attention_output_weight"}


def test_first_and_last_layers_stay_in_the_models_own_precision():
    model = small_model(num_layers=4, quantization="emulated", first_layers_unquantized=1, last_layers_unquantized=2)
    quantized = {name.split(".")[2] for name, quantizer in quantizers_of(model).items() if quantizer.spec is not None}
    assert quantized == {"1"}
    rows = {row.tensor_class: row for row in quantization_report(model).rows}
    assert (rows["routed_expert_weight"].quantized, rows["routed_expert_weight"].high_precision) == (1, 3)
    assert rows["routed_expert_weight"].note == "3 in the model's own precision"


def test_rows_of_the_configuration():
    rows = {
        "routed_expert_weight": "E1M3_16x16",
        "router_logits": "MXFP8",
        "gradient": "NVFP4_16_SR_RHT",
        "value_output": "none",
    }
    model = small_model(quantization="emulated", quantization_rows=rows)
    got = {row.tensor_class: row for row in quantization_report(model).rows}
    assert got["routed_expert_weight"].format == "E1M3 / 16×16 / E4M3 × fp32 per matrix"
    assert got["router_logits"].quantized == 2
    assert got["value_output"].format == "none"
    assert got["gradient"].quantized > 0
    model(random_ids(), labels=random_ids()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_line_the_model_cannot_carry_out_is_reported_as_dropped():
    model = small_model(dense_ffn_hidden_size=0, quantization="emulated")
    report = quantization_report(model)
    assert {row.tensor_class for row in report.dropped} == {"dense_ffn_weight", "gate_preactivation"}
    assert "dropped: this model has no such tensor" in str(report)
    del model.decoder.layers[0].self_attention.core_attention.softmax_quantizer
    del model.decoder.layers[1].self_attention.core_attention.softmax_quantizer
    assert "dropped: the fused attention never writes its softmax" in str(quantization_report(model))


def test_the_report_names_bits_and_back_end():
    lines = str(quantization_report(small_model(quantization="emulated"))).splitlines()
    assert lines[0] == "quantization: emulated"
    expert = next(line for line in lines if line.startswith("routed_expert_weight"))
    assert expert.split() == [
        "routed_expert_weight",
        "2/2",
        "4.125",
        *["E2M1", "/", "8×8", "/", "E4M3", "×", "fp32", "per", "matrix"],
        "emulated",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "fp4"}, "quantization='fp4': needs one of none, emulated, native, auto, seed_literal, torchao"),
        ({"quantization_rows": {"expert": "MXFP8"}}, "tensor class='expert': needs one of routed_expert_weight"),
        ({"quantization_rows": {"value_output": "NVFP5"}}, "format='NVFP5'"),
        ({"quantization_rows": {"value_output": "NVFP4_0"}}, "block=0"),
        ({"first_layers_unquantized": -1}, "first_layers_unquantized=-1"),
        ({"first_layers_unquantized": 2, "last_layers_unquantized": 1}, "needs at most num_layers = 2"),
    ],
)
def test_bad_configuration_is_named_in_one_line(fields, message):
    with pytest.raises(ConfigurationError) as error:
        HybridSparseMoEConfig(**{**SMALL, **fields})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_native_is_refused_without_a_chip_that_has_it():
    with pytest.raises(ConfigurationError, match=r"quantization='native': needs TransformerEngine and a Blackwell GPU"):
        small_model(quantization="native")


def test_a_model_without_quantizers_is_refused():
    with pytest.raises(ConfigurationError, match="model='Linear': needs a HybridSparseMoEModel"):
        quantize_model(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match="policy='emulated': excludes weight_format"):
        quantize_model(small_model(), "MXFP8", policy=QuantizationPolicy.preset("emulated"))


def test_calibrated_ranges_travel_in_checkpoints_and_hold_in_inference_only(tmp_path):
    model = small_model(quantization="emulated")
    batches = [random_ids(), random_ids(1, 30) // 2]
    ranges = calibrate(model, batches)
    assert {name.rsplit(".", 1)[1] for name in ranges} == {
        "query_quantizer", "key_quantizer", "value_quantizer", "softmax_quantizer", "input_quantizer", "output_quantizer",
        "gate_quantizer", "logits_quantizer",
    }  # fmt: skip
    assert all(amax > 0 for amax in ranges.values())
    assert model.training
    path = save_checkpoint(model, None, None, step=1, directory=tmp_path)
    restored = small_model(quantization="emulated", init_seed=7)
    load_checkpoint(path, restored)
    ids = random_ids()
    static = model.eval()(ids)[0]
    assert torch.equal(restored.eval()(ids)[0], static)
    discard_calibration(restored)
    assert not torch.equal(restored(ids)[0], static)
    assert torch.equal(restored.train()(ids)[0], model.train()(ids)[0])


def test_a_static_range_replaces_the_measured_one():
    quantizer = small_model(quantization="emulated").decoder.layers[0].self_attention.value_quantizer.eval()
    x = torch.randn(4, 32)
    quantizer.calibrated_amax.fill_(float(x.abs().max()))
    alone = torch.cat([quantizer(row[None]) for row in x])
    assert torch.equal(quantizer(x), alone)
    quantizer.calibrated_amax.fill_(0.1)
    assert quantizer(x).abs().max() < x.abs().max() / 2


def test_statistics_count_what_the_forward_pass_did():
    model = small_model(quantization="emulated").train()
    with recorded_statistics(model) as recording:
        model(random_ids())
    statistics = recording.by_class()
    assert set(statistics) == {row.tensor_class for row in quantization_report(model).rows if row.quantized}
    assert 0.03 < statistics["routed_expert_weight"].relative_error < 0.15
    assert statistics["query_key_weight"].relative_error < 0.05
    assert all(figures.not_finite == 0 and figures.saturated < 0.05 for figures in statistics.values())
    assert all(quantizer.statistics is None for quantizer in quantizers_of(model).values())


def test_statistics_see_saturation_flushing_and_nan():
    quantizer = small_model(quantization="emulated").decoder.layers[0].self_attention.value_quantizer
    quantizer.spec = QuantizationSpec.parse("NVFP4_16", outer_scale="row", scale_limits=(1e-6, 10.0))
    x = torch.zeros(4, 16)
    x[0] = 1e4
    x[1] = 1e-9
    x[2, 0] = float("nan")
    with recorded_statistics(quantizer) as recording:
        quantizer(x)
    figures = recording.by_class()["value_output"]
    assert (figures.saturated, figures.flushed, figures.not_finite) == (0.25, 0.25, 1 / 64)


def test_blocks_grow_in_two_steps():
    model = small_model(quantization="emulated")
    assert grow_blocks(model)["routed_expert_weight"].startswith("E2M1 / 16×8")
    assert grow_blocks(model)["routed_expert_weight"].startswith("E2M1 / 16×16")
    assert grow_blocks(model) == {}
    rows = {row.tensor_class: row.format for row in quantization_report(model).rows}
    assert rows["dense_ffn_weight"].startswith("E2M1 / 16×16")
    assert rows["query_key_weight"] == "E4M3 / 32 / E8M0"


def test_learning_rate_rule():
    factors = [qat_learning_rate_factor(step, 100) for step in range(100)]
    assert factors == [0.5] * 10 + [1.0] * 90
