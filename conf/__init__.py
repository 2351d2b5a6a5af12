"""Override files for recipes: `nemo llm pretrain --factory hsmoe_tiny --yaml conf/experiment/demo.yaml`."""
