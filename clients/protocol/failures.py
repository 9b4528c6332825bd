"""Failures at a site that the server is meant to hear of: it can help, or begins the round again."""

from fedloom.conf.errors import UserError


class LostStateError(UserError):
    """The site has no state of the round that it should go on from."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


class UnknownConfigurationError(LookupError):
    """The site has no configuration of the digest that an order names; the server sends it when it hears of this."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no configuration {digest}")
        self.digest = digest


class SummedBeforeError(UserError):
    """The site's training of this round was summed over other sites already; with other batches it may be summed again."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


class BlamedError(UserError):
    """A site's shares for this one cannot be used."""

    def __init__(self, site: str, why: str) -> None:
        super().__init__(f"secure aggregation: {site}'s shares cannot be used: {why}")
        self.site = site


class RefusedError(UserError):
    """The server wants what this site's policy does not allow."""
