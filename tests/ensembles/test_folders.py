"""Ensembles of every kind in a folder: they come back exactly, and nothing else is taken for one."""

import copy
import json
import shutil

import peft
import pytest
import torch
from same import near
from small_networks import ALL, bert, clip, cnn, count, images, mlp, moved, vit
from small_training import unchanged
from torch import nn

from uqlab import __version__, ensembles, extraction, heads, models, training
from uqlab.core.tensors import load_tensors, save_tensors
