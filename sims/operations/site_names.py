"""Find sites by what tables print: a name, or the value of the column that divides a table among sites."""

from collections.abc import Sequence
from pathlib import Path

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.server.run_folder.results_schema import sound_summary
from fedloom.server.unlearning.certificate import parts_of
from fedloom.sims.report.forgetting import forgotten_sites
from fedloom.sims.report.results import titled


def site_names(path: Path, config: Config, names: Sequence[str]) -> list[str]:
    """Return the names of sites, each named by its name, `COLUMN=VALUE`, VALUE, or `NAME (COLUMN=VALUE)`.

    Raises UserError for a name that no site or several have, in a run whose sites divide a table by a column.
    """
    known = [site.name for site in config.roster]
    if set(names) <= set(known):
        return list(names)
    summary = sound_summary(path)
    titles = titled(summary) or {site: f"{site} ({part})" for site, part in parts_of(config, known).items()}
    titles |= {forgotten.site: forgotten.title for forgotten in forgotten_sites(path, summary)}
    parts = {site: title.removeprefix(f"{site} (").removesuffix(")") for site, title in titles.items() if title != site}
    return [_site(name, known, parts, titles) for name in names] if parts else list(names)


def _site(name: str, known: Sequence[str], parts: dict[str, str], titles: dict[str, str]) -> str:
    fits = [site for site, part in parts.items() if name in (part, part.partition("=")[2], titles[site])]
    if name in known:
        return name
    if len(fits) > 1:
        raise UserError(f"'{name}' is {', '.join(titles[site] for site in fits)}; write one of these names")
    if not fits:
        raise unknown("site", name, [titles.get(site, site) for site in known])
    return fits[0]
