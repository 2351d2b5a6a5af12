import pytest

from nemo_hsmoe.runtime.errors import ConfigurationError


@pytest.fixture(scope="module")
def recipes():
    from nemo_hsmoe import recipes

    return recipes


@pytest.mark.parametrize("name", ["hsmoe_5b", "hsmoe_33b", "hsmoe_1b", "hsmoe_tiny"])
def test_every_recipe_trains_its_size(recipes, name):
    import fiddle as fdl

    from nemo_hsmoe.model.report import parameter_report
    from nemo_hsmoe.model.sizes import config_for

    recipe = getattr(recipes, name)()
    config = fdl.build(recipe.model.config)
    assert parameter_report(config) == parameter_report(config_for(name))
    assert config.seq_length == recipe.data.seq_length
    assert config.num_moe_experts == 64
    assert config.num_shared_experts == 8
    assert config.moe_router_topk == 4
    assert config.vocab_size == 128_256
    assert config.balance_bias_update_rate > 0


def test_the_5b_run_is_the_specified_one(recipes):
    recipe = recipes.hsmoe_5b()
    assert recipe.data.global_batch_size * recipe.data.seq_length == 8_388_608
    assert recipe.trainer.max_steps == 1_789
    assert recipe.trainer.strategy.expert_model_parallel_size == 4
    optim = recipe.optim.config
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (3e-4, 0.9, 0.95, 1e-8)
    assert (optim.weight_decay, optim.clip_grad) == (0.1, 1.0)
    literal = recipes.hsmoe_5b(batch="literal")
    assert literal.data.global_batch_size * literal.data.seq_length == 2_048
    assert literal.trainer.max_steps == 7_324_219
    assert literal.optim.lr_scheduler.warmup_steps == round(0.02 * 7_324_219)
    assert recipes.hsmoe_5b(batch="literal", max_steps=22_000_000).log.ckpt.every_n_train_steps == 100_000


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (
            "hsmoe_5b",
            {"expert_parallelism": 3},
            "expert_parallelism=3: needs a divisor of num_nodes × num_gpus_per_node = 4",
        ),
        ("hsmoe_5b", {"batch": "large"}, "batch='large': needs one of sequences, literal"),
        ("hsmoe_tiny", {"num_gpus_per_node": 3}, "expert_parallelism=3: needs a divisor of the 64 routed experts"),
        ("hsmoe_tiny", {"num_nodes": 0}, "num_nodes=0: needs a positive whole number"),
        ("hsmoe_5b", {"max_steps": 0}, "max_steps=0: needs a positive number of iterations"),
        ("hsmoe_tiny", {"seed": -1}, "seed=-1: needs a whole number"),
        (
            "hsmoe_5b",
            {"num_nodes": 4, "expert_parallelism": 16, "shared_experts": "sharded"},
            "expert_parallelism=16: needs a divisor of the 8 shared experts",
        ),
        ("hsmoe_1b", {"shared_experts": "some"}, "shared_expert_placement='some'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(recipes, recipe, arguments, message):
    with pytest.raises(ConfigurationError) as error:
        getattr(recipes, recipe)(**arguments)
    assert message in str(error.value)


def test_the_data_module_names_batches_that_do_not_fit(recipes):
    import fiddle as fdl

    for arguments, message in (
        ({"micro_batch_size": 3}, "global_batch_size=4: needs a multiple of micro_batch_size = 3"),
        ({"global_batch_size": 0}, "micro_batch_size"),
    ):
        with pytest.raises(Exception, match="batch_size") as error:
            fdl.build(recipes.hsmoe_tiny(**{"micro_batch_size": 1, **arguments}).data)
        assert message in str(error.value) or "global_batch_size=0" in str(error.value)


def test_executors(recipes):
    four = recipes.local_4xb300()
    assert four.ntasks_per_node == 4
    assert four.launcher == "torchrun"
    assert four.env_vars["NCCL_P2P_LEVEL"] == "NVL"
    assert four.env_vars["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_NVLS_ENABLE" not in four.env_vars
    assert recipes.local_cpu().env_vars["CUDA_VISIBLE_DEVICES"] == ""
