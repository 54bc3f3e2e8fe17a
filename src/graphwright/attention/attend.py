"""Attention over the edges of a pattern, as a function of tensors with a gradient."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from graphwright.autograd import Function, ModifiedSinceForward, Tensor, as_tensor, no_grad
from graphwright.autograd.recorder import active_recorder
from graphwright.errors import ShapeError, UsageError, check_type
from graphwright.ops import call
from graphwright.patterns import GateNotAllowed, HeadMismatch, Pattern, PatternShape
from graphwright.program.patterns import variable_of
from graphwright.settings import Positive, Settings, check_settings
