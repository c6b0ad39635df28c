"""The environment in which Serve answers fast and loses nothing.

Serve's processes read it when they start, so whatever starts Ray must set it first:
`cloudsched serve` does; `serve/fast_path.env` has the same for `ray start`.
"""

FAST_PATH = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Every call may be repeated safely, so HAProxy sends one whose replica died to another.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response junk-response",
    "RAY_SERVE_HAPROXY_RETRIES": "3",
    # A repeat needs the whole request in a buffer.
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # Otherwise HAProxy reports every request to a Python process; /metrics has these figures.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cloudsched.serving.middleware.middlewares",
}
