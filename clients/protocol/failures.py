"""Failures at a site that are reported to the server, which can mend them or restart the round."""

from fedloom.conf.errors import UserError


class LostStateError(UserError):
    """The site lost its state of the round that it should continue from."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


class UnknownConfigurationError(LookupError):
    """The site does not have the configuration that an order names. The server then sends it."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no configuration {digest}")
        self.digest = digest


class SummedBeforeError(UserError):
    """The site's training of this round is already in a sum over other sites. The site must train on other batches."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


class BlamedError(UserError):
    """The secret shares that another site sent to this one are unusable."""

    def __init__(self, site: str, why: str) -> None:
        super().__init__(f"secure aggregation: {site}'s shares cannot be used: {why}")
        self.site = site


class DropoutError(UserError):
    """The site fails, as federation.dropout has drawn."""

    def __init__(self, moment: str) -> None:
        super().__init__(f"federation.dropout: the site fails {moment} its training")


UNTRAINED = "the site has not trained yet"


class UntrainedError(UserError):
    """The site has no network of its own yet. `purpose`: what the server wants to do with it."""

    def __init__(self, site: str, purpose: str) -> None:
        super().__init__(f"{site}: {UNTRAINED}, so it has no network to {purpose}")


class RefusedError(UserError):
    """The site's policy does not allow the server's request."""


class SpentError(UserError):
    """Another round would exceed a limit of privacy loss. The server may read `public`, which has no number of the site."""

    def __init__(self, text: str, key: str) -> None:
        super().__init__(text)
        self.public = f"its privacy budget ({key}) is spent, so it trains in no more rounds"
