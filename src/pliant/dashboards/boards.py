"""Our dashboards: one for the whole cluster, one for each kind, one for tenants.

Names with `ray_` are counted by gateways and replicas and read from Ray's pages, the others from a gateway's /metrics.
"""

from __future__ import annotations

from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

_SERVICE = 'service=~"$service"'
_OVER = "[$__rate_interval]"
_ANSWERED = 'outcome=~"ok|degraded"'


def _rate(metric: str, *by: str, where: str = "") -> str:
    """How fast a counter grows, summed up by labels."""
    chosen = ", ".join(filter(None, (_SERVICE, where)))
    return f"sum by ({', '.join(by or ('service',))}) (rate({metric}{{{chosen}}}{_OVER}))"


def _sum(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by or ('service',))}) ({metric}{{{_SERVICE}}})"


def _quantile(share: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', 'le', *(by or ('service',)))})"


def _share(part: str, whole: str) -> str:
    """0 where the part was never counted."""
    return f"({part} or 0 * {whole}) / {whole}"


def _by_tenant(metric: str, *more: str, where: str = "") -> str:
    return f"sum by ({', '.join(('tenant', *more))}) (rate({metric}{where}{_OVER}))"


def _of_all(outcomes: str) -> str:
    """Share of requests that ended so, of all services together."""
    ended = f'sum(rate({_REQUESTS}{{{_SERVICE}, outcome=~"{outcomes}"}}{_OVER}))'
    return f"({ended} or vector(0)) / sum(rate({_REQUESTS}{{{_SERVICE}}}{_OVER}))"


_REQUESTS = "ray_pliant_requests_total"
_TENANT_REQUESTS = "ray_pliant_tenant_requests_total"

CLUSTER = Dashboard(
    "cluster",
    "pliant: the cluster",
    _REQUESTS,
    (
        Row(
            "Now",
            (
                Panel(
                    "Answered in time",
                    (
                        Query(
                            f"1 - (sum(rate(ray_pliant_slo_violations_total{{{_SERVICE}}}{_OVER})) or vector(0)) / "
                            f"sum(rate({_REQUESTS}{{{_SERVICE}, {_ANSWERED}}}{_OVER}))",
                            "in time",
                        ),
                    ),
                    "Of answered requests. Below 99%: look for the service whose latency rises below.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Answers a second",
                    (Query(f"sum(rate({_REQUESTS}{{{_SERVICE}, {_ANSWERED}}}{_OVER}))", "answers"),),
                    "Of all services.",
                    "reqps",
                    "stat",
                    4,
                ),
                Panel(
                    "Refused for lack of room",
                    (Query(_of_all("shed"), "shed"),),
                    "Add replicas, or raise `max`, of the service that sheds.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Errors",
                    (Query(_of_all("failed|unavailable"), "errors"),),
                    "Requests that no replica could answer, or that broke. The gateway's log names each by request id.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Replicas",
                    (Query(f"sum(pliant_service_replicas{{{_SERVICE}}})", "replicas"),),
                    "That gateways know.",
                    "none",
                    "stat",
                    4,
                ),
                Panel(
                    "Services that cannot answer",
                    (Query(f"count(pliant_service_ready{{{_SERVICE}}} == 0) or vector(0)", "not ready"),),
                    "`/v2/health/ready` says what each waits for.",
                    "none",
                    "stat",
                    4,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Answers by service",
                    (Query(_rate(_REQUESTS, where=_ANSWERED)),),
                    "Texts, images and answers of language models, each once.",
                    "reqps",
                ),
                Panel(
                    "All others by outcome",
                    (Query(_rate(_REQUESTS, "service", "outcome", where='outcome!="ok"'), "{{service}} {{outcome}}"),),
                    "shed, too_late: too little room. unavailable, failed: something is down. rejected: clients err.",
                    "reqps",
                ),
                Panel(
                    "Share answered late",
                    (Query(_share(_rate("ray_pliant_slo_violations_total"), _rate(_REQUESTS, where=_ANSWERED))),),
                    "After the SLO of the request.",
                    "percentunit",
                ),
                Panel(
                    "Latency, median",
                    (Query(_quantile(0.5, "ray_pliant_request_latency_seconds")),),
                    "From arrival in the gateway to the whole answer.",
                    "s",
                ),
                Panel(
                    "Latency, 98th percentile",
                    (Query(_quantile(0.98, "ray_pliant_request_latency_seconds")),),
                    "The paper's tail.",
                    "s",
                ),
                Panel(
                    "Other replicas asked",
                    (Query(_rate("ray_pliant_retries_total", "service", "reason"), "{{service}} {{reason}}"),),
                    "lost: a replica died or broke down. stalled: it took much longer than predicted. Others: normal.",
                    "reqps",
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "Replicas by service",
                    (Query(_sum("pliant_service_replicas")),),
                    "That the gateway knows.",
                    "none",
                ),
                Panel(
                    "Left alone",
                    (Query(_sum("pliant_service_replicas_ejected")),),
                    "Replicas that failed again and again, and get no requests for a while. Look at their log.",
                    "none",
                ),
                Panel(
                    "Problems that need a person",
                    (Query(_sum("pliant_service_problems")), Query("1 - pliant_planner_reached", "planner away")),
                    "Adapters, tasks or promises; /stats says which.",
                    "none",
                ),
            ),
        ),
    ),
)

TEXTS = Dashboard(
    "encoder",
    "pliant: text classifiers, embeddings, rerankers",
    "pliant_requests_served_total",
    (
        Row(
            "Work",
            (
                Panel(
                    "Tokens and padding",
                    (
                        Query(_rate("ray_pliant_tokens_total"), "{{service}} tokens"),
                        Query(_rate("ray_pliant_padding_tokens_total"), "{{service}} padding"),
                    ),
                    "A second. Much padding: lengths do not fit the texts.",
                ),
                Panel(
                    "Texts computed together",
                    (Query(f"{_rate('pliant_requests_served_total')} / {_rate('pliant_passes_total')}"),),
                    "Texts in a pass. It rises with load.",
                ),
                Panel(
                    "Waiting or running",
                    (Query(_sum("pliant_requests_waiting", "service", "runtime"), "{{service}} {{runtime}}"),),
                    "In replicas.",
                ),
            ),
        ),
        Row(
            "Plan",
            (
                Panel(
                    "Demand by length",
                    (
                        Query(
                            _sum("pliant_demand_requests_per_second", "service", "runtime"), "{{service}} {{runtime}}"
                        ),
                    ),
                    "Texts a second for which the runtime is the shortest that fits.",
                    "reqps",
                ),
                Panel(
                    "Planned replicas by length",
                    (Query(_sum("pliant_planned_replicas", "service", "runtime"), "{{service}} {{runtime}}"),),
                    "What replicas should hold.",
                    "none",
                ),
                Panel(
                    "Demand without a place",
                    (Query(_sum("pliant_plan_excess_requests_per_second")),),
                    "Above 0: add replicas.",
                    "reqps",
                ),
                Panel(
                    "Predicted and measured latency",
                    (
                        Query(_sum("pliant_plan_predicted_latency_seconds"), "{{service}} predicted"),
                        Query(_quantile(0.5, "ray_pliant_request_latency_seconds"), "{{service}} median"),
                    ),
                    "The prediction is of the mean.",
                    "s",
                ),
                Panel(
                    "Moves",
                    (
                        Query(_rate("pliant_moves_total"), "{{service}}"),
                        Query(_rate("pliant_failed_moves_total"), "{{service}} failed"),
                    ),
                    "Replicas given another length, a second.",
                ),
                Panel(
                    "Replicas wanted",
                    (
                        Query(_sum("pliant_wanted_replicas"), "{{service}} wanted"),
                        Query(_sum("pliant_service_replicas"), "{{service}}"),
                    ),
                    "By autoscaling.",
                    "none",
                ),
            ),
        ),
    ),
)

CASCADES = Dashboard(
    "cascade",
    "pliant: cascades",
    "pliant_cascade_ready",
    (
        Row(
            "Flow",
            (
                Panel(
                    "Answers by the last level that read",
                    (Query(_rate("ray_pliant_cascade_answers_total", "service", "level"), "{{service}} {{level}}"),),
                    "The first level should answer most.",
                    "reqps",
                ),
                Panel(
                    "Sent on",
                    (
                        Query(
                            f"{_rate('ray_pliant_cascade_rerouted_total', 'service', 'level')} / on (service) "
                            f"group_left () {_rate('ray_pliant_cascade_answers_total')}",
                            "{{service}} {{level}}",
                        ),
                        Query(
                            _sum("pliant_cascade_profiled_reroute_share", "service", "level"),
                            "{{service}} {{level}}, profiled",
                        ),
                    ),
                    "Share of texts, beside the profile's. Apart for long: the texts have changed; profile again.",
                    "percentunit",
                ),
                Panel(
                    "Words left out",
                    (
                        Query(
                            _share(
                                _rate("ray_pliant_cascade_words_pruned_total"), _rate("ray_pliant_cascade_words_total")
                            )
                        ),
                    ),
                    "Of texts that a further level read.",
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Promise",
            (
                Panel(
                    "Accuracy on the labelled texts",
                    (Query(_sum("pliant_cascade_profiled_accuracy")),),
                    "Of what serves.",
                    "percentunit",
                ),
                Panel(
                    "Kept, and drifting",
                    (
                        Query(_sum("pliant_cascade_promise_kept"), "{{service}} kept"),
                        Query(
                            f"max by (service) (pliant_cascade_reroute_drifting{{{_SERVICE}}})", "{{service}} drifts"
                        ),
                    ),
                    "1 is yes.",
                    "none",
                ),
                Panel(
                    "Degraded",
                    (
                        Query(
                            _rate("ray_pliant_cascade_degraded_total", "service", "level", "reason"),
                            "{{service}} without {{level}}: {{reason}}",
                        ),
                    ),
                    "Answers without a level that was to read the text.",
                    "reqps",
                ),
            ),
        ),
    ),
)

_HITS, _MISSES = (_rate(f"pliant_adapter_cache_{which}_total") for which in ("hits", "misses"))

LANGUAGE_MODELS = Dashboard(
    "llm",
    "pliant: language models",
    "pliant_llm_answers_total",
    (
        Row(
            "What clients see",
            (
                Panel(
                    "Time to the first token, 99th percentile",
                    (Query(_quantile(0.99, "ray_pliant_time_to_first_token_seconds")),),
                    "From arrival in the gateway.",
                    "s",
                ),
                Panel(
                    "Time to the first token, median, by rank of the adapter",
                    (
                        Query(
                            _quantile(0.5, "ray_pliant_time_to_first_token_seconds", "service", "rank"),
                            "{{service}} rank {{rank}}",
                        ),
                    ),
                    "0 is without an adapter.",
                    "s",
                ),
                Panel(
                    "Time for each further token, 99th percentile",
                    (Query(_quantile(0.99, "ray_pliant_time_per_output_token_seconds")),),
                    "Mean of an answer.",
                    "s",
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens a second",
                    (
                        Query(_rate("ray_pliant_prompt_tokens_total"), "{{service}} read"),
                        Query(_rate("ray_pliant_generated_tokens_total"), "{{service}} generated"),
                    ),
                    "Of prompts, and of answers.",
                ),
                Panel(
                    "Running and waiting",
                    (
                        Query(_sum("pliant_llm_requests_running"), "{{service}} running"),
                        Query(_sum("pliant_llm_requests_waiting"), "{{service}} waiting"),
                    ),
                    "Requests. Waiting for long: add replicas.",
                    "none",
                ),
                Panel(
                    "Mean wait by queue",
                    (
                        Query(
                            f"{_rate('pliant_queue_wait_seconds_total', 'service', 'class')} / "
                            f"{_rate('pliant_queue_requests_admitted_total', 'service', 'class')}",
                            "{{service}} {{class}}",
                        ),
                    ),
                    "0 holds the smallest requests.",
                    "s",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Live tokens",
                    (Query(_sum("pliant_llm_live_tokens")),),
                    "That requests hold or may come to hold.",
                    "none",
                ),
                Panel(
                    "Adapters in memory",
                    (Query(_sum("pliant_adapter_bytes_resident"), "{{service}}"),),
                    "In memory that no request uses.",
                    "bytes",
                ),
                Panel(
                    "Adapter was there",
                    (Query(f"{_HITS} / ({_HITS} + {_MISSES})"),),
                    "Share of requests with an adapter.",
                    "percentunit",
                ),
                Panel(
                    "Adapters loaded and evicted",
                    (
                        Query(_rate("pliant_adapter_loads_total"), "{{service}} loaded"),
                        Query(
                            _rate("pliant_adapter_cache_evictions_total", "service", "reason"), "{{service}} {{reason}}"
                        ),
                        Query(_rate("pliant_adapter_load_failures_total"), "{{service}} failed"),
                    ),
                    "A second. Failures: /stats has the reason under problems.",
                ),
                Panel(
                    "Length of answers predicted in the right class",
                    (Query(f"avg by (service) (pliant_output_length_accuracy{{{_SERVICE}}})"),),
                    "The scheduler's queues depend on it.",
                    "percentunit",
                ),
            ),
        ),
    ),
)

_COMPUTED = _rate("pliant_vision_batch_images_total")

VISION = Dashboard(
    "vision",
    "pliant: vision transformers",
    "pliant_vision_tasks_registered",
    (
        Row(
            "Work",
            (
                Panel(
                    "Images by fate",
                    (Query(_rate("pliant_vision_images_total", "service", "fate"), "{{service}} {{fate}}"),),
                    "evicted: gave way to others. shed: refused at once.",
                    "reqps",
                ),
                Panel(
                    "Utility a second",
                    (Query(_rate("pliant_vision_utility_total")),),
                    "Expected, of answers in time: what the scheduler maximises.",
                ),
                Panel(
                    "Tokens added to a layer",
                    (
                        Query(
                            f"sum by (service, gamma) (rate(pliant_vision_batch_images_total{{{_SERVICE}}}{_OVER}))",
                            "{{service}} {{gamma}}",
                        ),
                    ),
                    "Images a second by gamma: negative ones merge tokens, for speed.",
                    "reqps",
                ),
            ),
        ),
        Row(
            "Engine",
            (
                Panel(
                    "Images in a batch",
                    (Query(f"{_COMPUTED} / {_rate('pliant_vision_batches_total')}"),),
                    "On average.",
                ),
                Panel(
                    "Waiting",
                    (Query(_sum("pliant_vision_images_waiting")),),
                    "Images.",
                    "none",
                ),
                Panel(
                    "Slower than profiled",
                    (Query(f"max by (service) (pliant_vision_slowdown{{{_SERVICE}}})"),),
                    "Above 1.5 for long: something else uses the device.",
                ),
                Panel(
                    "Choosing the next batch, 99th percentile",
                    (Query(f"max by (service) (pliant_vision_decision_p99_milliseconds{{{_SERVICE}}})"),),
                    "Of late.",
                    "ms",
                ),
            ),
        ),
    ),
)

TENANTS = Dashboard(
    "tenants",
    "pliant: tenants",
    _REQUESTS,
    (
        Row(
            "Tenants",
            (
                Panel(
                    "Requests",
                    (Query(_by_tenant(_TENANT_REQUESTS), "{{tenant}}"),),
                    "Over HTTP.",
                    "reqps",
                    width=12,
                ),
                Panel(
                    "Tokens",
                    (Query(_by_tenant("ray_pliant_tenant_tokens_total"), "{{tenant}}"),),
                    "Of texts, prompts and answers, a second.",
                    width=12,
                ),
                Panel(
                    "Refused",
                    (
                        Query(
                            _by_tenant(_TENANT_REQUESTS, "status", where='{status=~"4..|5.."}'),
                            "{{tenant}} {{status}}",
                        ),
                    ),
                    "429: a limit of the tenant's, or too little room for all.",
                    "reqps",
                    width=24,
                ),
            ),
        ),
    ),
)

BOARDS = (CLUSTER, TEXTS, CASCADES, LANGUAGE_MODELS, VISION, TENANTS)
