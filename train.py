"""Train: ``python train.py recipe=vit_ropemixed``; ``python train.py --help`` lists recipes and choices."""

from mmpos.cli import train_command

if __name__ == "__main__":
    train_command()
