"""Training objectives about position: losses and small modules that run on any encoder and any encoding."""

from mmpos.objectives._common import PlainDecoder, Trunk, random_subset
from mmpos.objectives.droppos import (
    DropPos,
    attentive_weights,
    position_accuracy,
    position_loss,
    smoothing_sigma,
    smoothing_targets,
)
from mmpos.objectives.embedding_dropout import EmbeddingDropout, drop_embedding
from mmpos.objectives.flexpredict import FlexPredict, StochasticPositions, predicted_blocks
from mmpos.objectives.mp3 import MP3, context_mask
from mmpos.objectives.seqpe import (
    contrastive_candidates,
    contrastive_loss,
    nearest_candidate,
    random_shift,
    transfer_loss,
)

__all__ = [
    "MP3",
    "DropPos",
    "EmbeddingDropout",
    "FlexPredict",
    "PlainDecoder",
    "StochasticPositions",
    "Trunk",
    "attentive_weights",
    "context_mask",
    "contrastive_candidates",
    "contrastive_loss",
    "drop_embedding",
    "nearest_candidate",
    "position_accuracy",
    "position_loss",
    "predicted_blocks",
    "random_shift",
    "random_subset",
    "smoothing_sigma",
    "smoothing_targets",
    "transfer_loss",
]
