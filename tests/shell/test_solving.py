"""The solver in a process of its own: same answer, the loop stays free, and nothing is left when it is stopped."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from halda import Infeasible, solve
from primad.daemon import solving
from primad.daemon.solving import Question, solve_apart
from primad.errors import PlanError
