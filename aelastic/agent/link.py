"""The agent's link to the leader of its job, as its spec says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aelastic.agent.open_files import files_for_connections
from aelastic.base.loop import clock
from aelastic.rdzv.registry import AgentContext, InProcessLink, Link, factory_of
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.single_node import SingleNode
from aelastic.spec import RestartRules, WorkerSpec

if TYPE_CHECKING:
    from aelastic.rdzv.torch_handler_link import TorchHandlerLink

_log = logging.getLogger(__name__)


def open_link(spec: WorkerSpec, node_id: str, around: AgentContext) -> Link:
    """Returns this agent's link to the leader of its job.

    Raises:
        InputError: there is no such back end.
    """
    settings, policy = spec.rdzv, policy_of(spec)
    if spec.rdzv_handler is not None:
        from aelastic.rdzv.lent_handler import lent

        return torch_handler_link(spec, policy, lent(spec.rdzv_handler).borrowed)
    if settings is None:
        # No store keeps a term, so the clock makes the number of a round rise over all starts of the job.
        return InProcessLink(SingleNode(policy, clock.wall_ms()))
    if (make_store := factory_of(settings.backend)) is None:
        from aelastic.rdzv.torch_handler_link import handler_opener

        opener = handler_opener(settings.backend, settings, around.run_id)
        return torch_handler_link(spec, policy, opener)
    from aelastic.rdzv.agent_link import AgentLink
    from aelastic.rdzv.protocol.secret_file import SecretFile
    from aelastic.rdzv.stores.endpoint_cell import EndpointCell

    path = settings.secret_path
    secret = None if path is None else SecretFile(path, around.run_id)
    cell = EndpointCell(make_store(settings, around), secret, settings.lease_s)
    return AgentLink(cell, settings, around.run_id, node_id, policy, files_for_connections(spec), secret)


def torch_handler_link(spec: WorkerSpec, policy: RestartPolicy, open_handler: Callable[[], Any]) -> TorchHandlerLink:
    """Returns the link of an agent that meets the others by a torch rendezvous handler."""
    from aelastic.rdzv.torch_handler_link import TorchHandlerLink

    is_named = spec.rdzv is not None  # torchrun does not set an address in its spec either, for a named back end
    return TorchHandlerLink(
        open_handler,
        policy,
        monitor_interval_s=spec.monitor_interval,
        exit_barrier_timeout_s=spec.exit_barrier_timeout_s,
        master_addr=None if is_named else spec.master_addr,
        master_port=None if is_named else spec.master_port,
        local_addr=None if spec.rdzv is None else spec.rdzv.local_addr,
    )


def policy_of(rules: RestartRules) -> RestartPolicy:
    """Returns the policy that decides what follows from failures, according to the rules."""
    if not rules.restart_policy:
        return RestartPolicy(rules.max_restarts)
    from aelastic.rdzv.restart_rules import parse

    parsed = parse(rules.restart_policy)
    if endless := next((each for each in parsed if each.is_endless), None):
        _log.warning("--restart-policy: %s restarts workers without limit", endless.text)
    return RestartPolicy(rules.max_restarts, parsed, rules.restart_policy)
