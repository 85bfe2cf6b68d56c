"""Checkpoints: written beside the run, made visible by one rename, and read by as many ranks as there are now."""

from sidco_ddp.training.checkpoints.directory import Directory
from sidco_ddp.training.checkpoints.every import Every
from sidco_ddp.training.checkpoints.manifest import CheckpointError, Manifest
from sidco_ddp.training.checkpoints.reader import load_latest, load_path
from sidco_ddp.training.checkpoints.writer import Checkpoints

__all__ = ["CheckpointError", "Checkpoints", "Directory", "Every", "Manifest", "load_latest", "load_path"]
