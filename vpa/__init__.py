"""Vocabulary-parallel argmax: the greedy token of logits split over ranks by vocabulary, without gathering them."""

from vpa import comm
from vpa.acceptance import conditional_acceptance
from vpa.calibrate import calibrate
from vpa.captured import CapturedTokens
from vpa.draft import capture_drafts, draft_tokens
from vpa.drafters import validate_local_argmax_reduction
from vpa.emulate import emulate_top_tokens
from vpa.gate import GateCounter, Reason, VerifyBatch, verify_gate
from vpa.lm_head import ParallelLMHead
from vpa.logits import LogitsProcessor
from vpa.norm import allreduce_rmsnorm, emulate_allreduce_rmsnorm, prepare_allreduce_rmsnorm
from vpa.pick import pick_from_candidates
from vpa.scan import local_argmax_candidates
from vpa.switch import SwitchTable
from vpa.top_tokens import TopTokens, get_top_tokens
from vpa.transform import Transform
from vpa.verifier import CapturedGreedyVerify, GreedyVerify
from vpa.verify import emulate_greedy_verify, greedy_verify
from vpa.vocab import VocabShard, shard_vocab

__version__ = "0.1.0"

__all__ = [
    "CapturedGreedyVerify",
    "CapturedTokens",
    "GateCounter",
    "GreedyVerify",
    "LogitsProcessor",
    "ParallelLMHead",
    "Reason",
    "SwitchTable",
    "TopTokens",
    "Transform",
    "VerifyBatch",
    "VocabShard",
    "allreduce_rmsnorm",
    "calibrate",
    "capture_drafts",
    "comm",
    "conditional_acceptance",
    "draft_tokens",
    "emulate_allreduce_rmsnorm",
    "emulate_greedy_verify",
    "emulate_top_tokens",
    "get_top_tokens",
    "greedy_verify",
    "local_argmax_candidates",
    "pick_from_candidates",
    "prepare_allreduce_rmsnorm",
    "shard_vocab",
    "validate_local_argmax_reduction",
    "verify_gate",
]
