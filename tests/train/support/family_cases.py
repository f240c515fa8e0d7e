"""What is measured of every family: micro-batches against its sequences alone, replicas, adapters."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import families
import numpy as np
import torch
from conftest import naive_logprobs
from gang import apart, gradient, held, make_trainer, place

from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.layouts import ModelFit, fit_of
from rollpacker.train.model.packing import Item
