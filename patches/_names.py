"""Names of the consumer and of vLLM that several patches share."""

from __future__ import annotations

from vllm_compat.registry import Retirement

CONSUMER = ">=0.3.0,<0.5"
CONSUMER_03 = ">=0.3.0,<0.4"
CONSUMER_04 = ">=0.4.0,<0.5"
"""speculators 0.3.0 is the release these patches are for first; 0.4 has the same generator with other faults."""

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
CONSUMER_EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
OUR_EXTENSION = "vllm_compat.patches.worker.extension.HiddenStatesWorkerExtension"

RESET = "_reset_capture"
FETCH = "_get_captured_states"
"""The consumer's calls into its worker extension: before the first step and after the last one."""

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's environment variable: whether workers are forked or spawned."""

ANNOUNCE = "_set_request_metadata"
"""Before each step, from 0.4 on: how many tokens of each request, for labels that ours do not need."""

RETIRES = Retirement(when="the consumer has no generator of its own", package="speculators", release=">=0.5")
"""speculators 0.5 dropped the generator; until then every seam of it stays."""
