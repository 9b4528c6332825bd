"""Who can participate: how many images of each site count, its classes, and which sites fit together.

The configuration says so if the server has the data. In a real federation, sites report it when they enrol.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedloom.clients.data import class_meanings, site_sizes
from fedloom.clients.data.forms import schema_of
from fedloom.clients.data.variants import outputs
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.client_metadata import ClientMetadata

MOST_OWN = 1000  # class names of a site whose number of outputs the server does not know


@dataclass
class Participants:
    """The sites that can participate in rounds.

    Attributes:
        config: The run's configuration.
        simulated: Whether the sites run in an engine on the user's own machines.
        enrolling: Asks sites to enrol, and returns their replies.
        message: Shows the user a message.
    """

    config: Config
    simulated: bool
    enrolling: Callable[[Sequence[Site]], Iterator[RawReply]]
    message: Callable[[str], None]
    _enrolled: ClientMetadata = field(default_factory=ClientMetadata)
    _shown: set[tuple[str, str]] = field(default_factory=set)  # the messages that the user has seen, by site

    @property
    def server_has_data(self) -> bool:
        """Whether the server knows the sites' data from the configuration, so that no site must report it."""
        return self.simulated or has_data(self.config)

    def bounds(self, site: Site) -> Bounds:
        """Return the limits that are enforced on what the site sends. Raises ReplyError if the site did not enrol."""
        if self.server_has_data:
            return Bounds.of(self.config.federation, self.samples(site))
        return replace(Bounds.of(self.config.federation, self._enrolled.images(site.name)), counted=self.samples(site))

    def samples(self, site: Site) -> int:
        """Return how many training examples of the site count.

        If the server has no data, the site reports its number, and federation.most_samples limits it, or else the other
        sites' numbers do. Raises ReplyError if the site has not reported it.
        """
        if self.server_has_data:
            return site_sizes(self.config)[site.index]
        reported, most = self._enrolled.images(site.name), self.config.federation.most_samples
        counted = min(reported, most) if most else self._enrolled.counted(site.name)
        if counted < reported and (site.name, "size") not in self._shown:
            self._shown.add((site.name, "size"))
            self.message(f"{site.name} reports {reported} images, many more than the other sites; {counted} count "
                         "(federation.most_samples sets another limit)")  # fmt: skip
        return counted

    def images(self, site: Site) -> int:
        """Return how many training examples of the site count (`samples`); 0 if it did not enrol."""
        try:
            return self.samples(site)
        except ReplyError:
            return 0

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """Return, by enrolled site, what its classes 0, 1, ... stand for; empty if unknown."""
        if self.server_has_data:
            return {site.name: class_meanings(site.spec) for site in sites}
        self._hear(sites)
        asked = {site.name for site in sites}
        return {site: names for site, names in self._enrolled.class_meanings().items() if site in asked}

    def enrolled_names(self, sites: Sequence[Site]) -> list[tuple[str, ...]]:
        """Return the class names of each enrolled, fitting site, without asking any site."""
        names, unlike = self._enrolled.class_names(), self._unlike()
        return [names[site.name] for site in sites if site.name in names and site.name not in unlike]

    def enrol(self, sites: Sequence[Site]) -> list[Site]:
        """Ask new sites to report their data, unless the server knows it; return the sites that fit together (`fitting`)."""
        self._hear(sites)
        return self.fitting(sites)

    def fitting(self, sites: Sequence[Site]) -> list[Site]:
        """Return the sites that fit together.

        A site does not fit if the names of its table's columns or, with shared outputs, of its classes differ from those of
        most enrolled sites: they would be mistaken for others.
        """
        unlike = self._unlike()
        for site in sites:
            if site.name in unlike and (site.name, "unlike") not in self._shown:
                self.message(f"{site.name} is not asked: {unlike[site.name]}")
                self._shown.add((site.name, "unlike"))
        return [site for site in sites if site.name not in unlike]

    def _unlike(self) -> dict[str, str]:
        classes = self._enrolled.unlike() if self.config.data.heads == "shared" else {}
        reasons = {site: f"{reason}, and data.heads=shared" for site, reason in classes.items()}
        return {**reasons, **self._enrolled.unlike_columns(self._columns())}

    def _columns(self) -> int:
        """Return the number of columns that the configuration states for tables; 0 if it states none."""
        stated = schema_of(self.config, self.config.roster[0].spec).shape if self.config.data.form else ()
        return stated[0] if len(stated) == 1 else 0

    def _outputs(self, site: Site) -> int:
        """Return the number of a site's outputs; if the server does not know it, the most that it takes."""
        try:
            used = outputs(self.config, site.spec)
        except UserError:  # heads of the sites' own, for data that only they know
            return MOST_OWN
        return used.stop - used.start

    def _hear(self, sites: Sequence[Site]) -> None:
        new = [site for site in sites if not (self.server_has_data or self._enrolled.has(site.name))]
        for reply in self.enrolling(new) if new else ():
            self._enrolled.take(reply, self._outputs(reply.site), self._columns())
