"""The memory proof: what every accelerator and host holds in each stage and on each entry, before anything starts."""

from rlplace.placement.memory.case import memory_case, with_share
from rlplace.placement.memory.demands import (
    EngineModel,
    FrozenModel,
    KvBytes,
    KvShare,
    PolicyLearner,
    PolicySampler,
    PolicyShape,
    PolicySpaces,
    Simulator,
    TrainedModel,
    policy_shape,
)
from rlplace.placement.memory.footprint import Assumptions, Demand, Footprint, HostPart, Part, Placed
from rlplace.placement.memory.formulas import FORMULAS, Formula
from rlplace.placement.memory.ledger import Account, Hold, Load, Measurements, MemoryCase, MemoryLedger, Moment
from rlplace.placement.memory.ledger_text import ledger_record, render_formulas, render_ledger
from rlplace.placement.memory.measured import read_measurements, record_measurements
from rlplace.placement.memory.model import Head, ModelShape, read_model
from rlplace.placement.memory.remedies import Remedy, find_remedies, find_shortages, proposals
from rlplace.placement.memory.solve import Knob, Solution, solve

__all__ = [
    "FORMULAS",
    "Account",
    "Assumptions",
    "Demand",
    "EngineModel",
    "Footprint",
    "Formula",
    "FrozenModel",
    "Head",
    "Hold",
    "HostPart",
    "Knob",
    "KvBytes",
    "KvShare",
    "Load",
    "Measurements",
    "MemoryCase",
    "MemoryLedger",
    "ModelShape",
    "Moment",
    "Part",
    "Placed",
    "PolicyLearner",
    "PolicySampler",
    "PolicyShape",
    "PolicySpaces",
    "Remedy",
    "Simulator",
    "Solution",
    "TrainedModel",
    "find_remedies",
    "find_shortages",
    "ledger_record",
    "memory_case",
    "policy_shape",
    "proposals",
    "read_measurements",
    "read_model",
    "record_measurements",
    "render_formulas",
    "render_ledger",
    "solve",
    "with_share",
]
