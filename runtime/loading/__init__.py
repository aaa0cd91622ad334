"""Values of parameters without a whole model in memory: from safetensors files (`recipes.py`), or from the model's initialisation
(`module_init.py`). `load.py` is what users call."""
