"""Trained models of tasks: a short training, weights in files, and progress on the way."""

from isokron.training.progress import Bar, Lines, Silent, Watcher
from isokron.training.train import make_model, train_
from isokron.training.weights import load_weights_, note_of, save_weights

__all__ = [
    "Bar",
    "Lines",
    "Silent",
    "Watcher",
    "load_weights_",
    "make_model",
    "note_of",
    "save_weights",
    "train_",
]
