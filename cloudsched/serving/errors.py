"""Why the service refuses a call, with the HTTP and gRPC status of each reason."""

from __future__ import annotations

from cloudsched.errors import CloudschedError


class RefusedError(CloudschedError):
    """Base of all refusals; the sentence goes to the client."""

    status = 400
    grpc_status = "INVALID_ARGUMENT"

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which a client may try again; None where trying again cannot help."""
        return None


class MalformedError(RefusedError):
    """The body is no JSON at all."""


class UnprocessableError(RefusedError):
    """The body is JSON, but no document that this call takes."""

    status = 422


class UnauthorisedError(RefusedError):
    """The token is missing or wrong."""

    status = 401
    grpc_status = "UNAUTHENTICATED"


class UnknownError(RefusedError):
    """There is no such cluster, fleet or path."""

    status = 404
    grpc_status = "NOT_FOUND"


class ConflictError(RefusedError):
    """An event is out of order or impossible, or the state has moved on; nothing was changed."""

    status = 409
    grpc_status = "FAILED_PRECONDITION"


class TooLargeError(RefusedError):
    """The body is larger than the service takes."""

    status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class RateLimitError(RefusedError):
    """The caller sends more than its share."""

    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    @property
    def retry_after_s(self) -> int:
        """One second refills the bucket."""
        return 1


class OverloadedError(RefusedError):
    """The service has as much in hand as it can do."""

    status = 503
    grpc_status = "UNAVAILABLE"

    @property
    def retry_after_s(self) -> int:
        """The work in hand is done within a second."""
        return 1
