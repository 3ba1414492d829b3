"""Training of image classifiers with Lightning. Needs ``pip install "mmpos[train]"``."""
