"""Which keys call which HTTP route.

Routes stand for methods of the contract, and the pods check those again. This table holds for what
the gateway itself keeps and does with its own key, such as samples. A route
without a row does not start.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_runtime.rpc.permissions import ALL, MANAGE, PLAY, READ, USE, Access

_TINKER = "/api/v1"
_RUN = "/training_runs/{model_id}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"
_SESSION = "/sessions/{session_id}"


def _rows(prefix: str, rows: Mapping[Access, str]) -> dict[tuple[str, str], Access]:
    found = {}
    for access, text in rows.items():
        for line in text.split():
            method, _, path = line.partition(":")
            found[method, prefix + path] = access
    return found


HTTP_PERMISSIONS: Mapping[tuple[str, str], Access] = {
    **_rows(
        _TINKER,
        {
            ALL: "POST:/client/config POST:/client/dynamic_config GET:/get_server_capabilities "
            "POST:/telemetry GET:/auth/apikey/me DELETE:/auth/apikey/me POST:/session_heartbeat",
            READ: f"GET:/billing/usage/events GET:/billing/usage/checkpoints/current "
            f"GET:/sessions POST:/sessions/search GET:{_SESSION} GET:{_SESSION}/trace_export "
            f"POST:/get_info GET:/training_runs GET:{_RUN} GET:{_RUN}/checkpoints "
            f"GET:/checkpoints POST:/weights_info GET:{_CHECKPOINT}/external_weights_urls",
            PLAY: f"POST:/create_session POST:{_SESSION}/finish POST:/create_sampling_session "
            "POST:/join_sampling_session GET:/samplers/{sampling_session_id} POST:/asample "
            "POST:/retrieve_future POST:/retrieve_futures POST:/cancel_future",
            USE: f"PUT:{_SESSION}/project POST:/create_model POST:/forward_backward "
            "POST:/optim_step POST:/save_weights POST:/save_weights_for_sampler "
            "POST:/save_weights_external POST:/load_weights "
            f"DELETE:{_CHECKPOINT} POST:{_CHECKPOINT}/publish DELETE:{_CHECKPOINT}/publish "
            f"PUT:{_CHECKPOINT}/ttl POST:/copy_weights",
            MANAGE: "GET:/audit",
        },
    ),
    **_rows(
        "/v1",
        {
            ALL: "GET:/models GET:/models/{id:path}",
            PLAY: "POST:/chat/completions POST:/completions POST:/responses "
            "POST:/messages POST:/messages/count_tokens",
        },
    ),
    **_rows(
        "/page/api",
        {
            ALL: "GET:/me",
            READ: "GET:/events GET:/capabilities GET:/runs GET:/runs/{run} GET:/metrics "
            "GET:/runs/{run}/curves GET:/runs/{run}/checkpoints GET:/checkpoints GET:/jobs "
            "GET:/jobs/{job} GET:/episodes GET:/episodes/{episode} GET:/matches "
            "GET:/matches/{match} GET:/samplers",
        },
    ),
    **_rows(
        "",
        {
            ALL: "GET:/episodes/{episode} POST:/is_episode_claimed GET:/get_engine_status "
            "GET:/get_current_batch_rollout_pool_information",
            PLAY: "POST:/claim_episode POST:/heartbeat_episode POST:/can_continue_episode "
            "POST:/end_episode POST:/submit_episode POST:/abort_episode "
            "POST:/tokenize POST:/detokenize",
            USE: "POST:/register_episode POST:/get_episode_buffer POST:/sync_train_config "
            "POST:/start_engine POST:/stop_engine POST:/update_engine_status",
        },
    ),
}
"""Roles by HTTP method and path."""


def access_of(method: str, path: str) -> Access:
    """Return which roles call a route.

    Raises:
        LookupError: If the table has no row for it.
    """
    try:
        return HTTP_PERMISSIONS[method, path]
    except KeyError as error:
        raise LookupError(f"{method} {path} has no row in the table of permissions") from error
