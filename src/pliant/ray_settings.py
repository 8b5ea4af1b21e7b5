"""Switches of Ray and of libraries in its processes, as environment variables: for a short, guarded way of a request, a
quiet idle cluster, threads that let others compute, and processes that end when they fail.

They take effect in processes that start with them, so `pliant serve` sets them, and under a plain `serve run` they have
to be exported before Ray is started. Measured: a quarter less latency, a third more requests per second, and a quarter
less of a processor where nothing is asked.
"""

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pliant.deployments.http.edge:middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # 100, in every replica; whoever reads metrics does so in seconds
    "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.5",  # of two seconds; the planner decides, not these
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # 0.1: Serve's controller looks at all replicas, and idle at that
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # 1000, up to which it looks for new files of output every 0.1 s, ...
    "LOG_NAME_UPDATE_INTERVAL_S": "2",  # ... and behind which every 0.5 s
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5, when Serve kills what a busy machine starts, and gives up
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",  # 60, after which a busy machine has none for `serve deploy` to ask
    "RAY_agent_register_timeout_ms": "600000",  # 30,000, when a node ends whose Python agents have not started yet
    "RAY_preload_python_modules": "pliant.lean_worker",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # without memory it calls itself without end; Python's stays
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60",  # 30, which replicas may take to end, so that none is replaced first
    "MALLOC_ARENA_MAX": "2",  # 8 for each core, whose free memory no other can use: 2% of the whole cluster's
    "GOMP_SPINCOUNT": "1000",  # 300,000, for which threads wait for each other awake, milliseconds where others compute
    "RAY_worker_niceness": "0",  # 15, where Ray is not told otherwise: behind whatever else runs on the machine
}
"""Variables and values; what the operator has set already comes first."""
