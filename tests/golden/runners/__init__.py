"""One module per method folder, named as the folder, with ``run(case) -> {name of an output: tensor}``."""
