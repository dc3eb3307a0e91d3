# SPDX-License-Identifier: Apache-2.0
"""AIFBDataset, MUTAGDataset, BGSDataset, AMDataset: RDF graphs with classes of some entities.

Source: Ristoski, de Vries and Paulheim, "A Collection of Benchmark Datasets for Systematic
Evaluations of Machine Learning on the Semantic Web", ISWC 2016. What is an entity of which type,
and which relations tell the class and are left out, is as in DGL's data sets of these names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._base.files import open_regular, read_text_regular
from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from ...graph import Graph, heterograph, load_graphs
from .dgl_dataset import OneGraphDataset, find_folder

__all__ = ["AIFBDataset", "AMDataset", "BGSDataset", "MUTAGDataset", "RDFGraphDataset"]

_SPLITS = ("trainingSet.tsv", "testSet.tsv")
_RENAMED = {"type": "rdftype", "rev-type": "rev-rdftype"}

_IRI = r"<([^<>\"{}|^`\\\x00-\x20]*)>"
_TRIPLE = re.compile(
    rf"\s*(?:{_IRI}|(_:\S+))\s+{_IRI}\s+"
    rf"(?:{_IRI}|(_:\S+)|\"((?:[^\"\\\n]|\\.)*)\"(?:@[A-Za-z0-9-]+|\^\^{_IRI})?)\s*\.\s*(?:#.*)?"
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_ESCAPED = {"t": "\t", "b": "\b", "n": "\n", "r": "\r", "f": "\f"}


class Term(NamedTuple):
    """A part of a triple."""

    kind: str  # "blank", "iri" or "literal", which sort in this order
    text: str


class Entity(NamedTuple):
    """A node: its id within its type, and its type if it has one."""

    id: str
    cls: str | None


class RDFGraphDataset(OneGraphDataset):
    """Base of the four: a typed graph with labels on the nodes of ``predict_category``.

    They have ``label``, ``train_mask`` and ``test_mask``. Read is what DGL has saved,
    ``aifb-hetero_dgl_graph.bin``; or the triples in files ``*.nt`` (N-Triples, or ``*.n3`` that
    have a whole triple in each line) with ``trainingSet.tsv`` and ``testSet.tsv``.
    """

    predict_category: str
    _title: str
    _columns = 0, 2  # of lines of the splits, which name an entity and its class

    def __init__(
        self,
        print_every: int = 10000,
        insert_reverse: bool = True,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self._insert_reverse = insert_reverse
        super().__init__(self._title, None, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        saved = f"{self.name}_dgl_graph.bin"
        usual = self._insert_reverse and not self._force_reload
        file_sets = [[saved], _SPLITS] if usual else [_SPLITS]
        folder = find_folder(self.raw_dir, [self.name], file_sets)
        if folder is None:
            raise FileNotFoundError(
                f"{self.name} is not downloaded: put its triples (*.nt), {' and '.join(_SPLITS)}, "
                f"or DGL's {saved}, into {Path(self.raw_dir) / self.name}"
            )
        is_saved = usual and (folder / saved).is_file()
        self._g = load_graphs(str(folder / saved))[0][0] if is_saved else self._built(folder)
        data = self._g.nodes[self.predict_category].data
        if "label" not in data:
            data["label"] = data["labels"]
        self._num_classes = int(data["label"].max()) + 1 if len(data["label"]) else 0
        self._say(
            f"{self.name}: {self._g.num_nodes()} nodes of {len(self._g.ntypes)} types, "
            f"{self._g.num_edges()} edges of {len(self._g.canonical_etypes)} relations"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self._num_classes

    def __getitem__(self, idx: int) -> Any:
        """The graph, whatever ``idx`` is."""
        return self._transformed(self._g)

    def parse_entity(self, term: Term) -> Entity | None:
        """The node that a term stands for; None for none."""
        raise NotImplementedError

    def parse_relation(self, term: Term) -> str | None:
        """The relation that a term stands for; None for one that is left out."""
        raise NotImplementedError

    def typed(
        self, triple: tuple[Term, Term, Term], ends: tuple[Entity, Entity], relation: str
    ) -> tuple[Entity, Entity]:
        """Both ends of an edge, whose types may depend on it."""
        return ends

    def _built(self, folder: Path) -> Graph:
        files = sorted(p for p in folder.iterdir() if p.suffix in (".nt", ".n3"))
        if not files:
            raise FileNotFoundError(f"{folder} has {_SPLITS[0]} and no triples (*.nt)")
        triples = sorted({triple for file in files for triple in read_triples(file)})
        numbers: dict[str, tuple[str, int]] = {}
        counts: dict[str, int] = {}
        edges: dict[CanonicalEType, tuple[list[int], list[int]]] = {}
        for triple in triples:
            subject, target = self.parse_entity(triple[0]), self.parse_entity(triple[2])
            relation = self.parse_relation(triple[1])
            if subject is None or target is None or relation is None:
                continue
            ends = []
            for entity in self.typed(triple, (subject, target), relation):
                name = f"{entity.cls}/{entity.id}"
                if name not in numbers:
                    ntype = _type_name(entity.cls)
                    numbers[name] = ntype, counts.get(ntype, 0)
                    counts[ntype] = numbers[name][1] + 1
                ends.append(numbers[name])
            ways = [(relation, ends), (f"rev-{relation}", ends[::-1])]
            for label, ((src_type, src), (dst_type, dst)) in ways[: 1 + bool(self._insert_reverse)]:
                etype = src_type, _type_name(_RENAMED.get(label, label)), dst_type
                sides = edges.setdefault(etype, ([], []))
                sides[0].append(src)
                sides[1].append(dst)
        if self.predict_category not in counts:
            raise GraphValueError(f"{folder} has no entity of type {self.predict_category!r}")
        g: Graph = heterograph(
            {etype: (torch.tensor(s), torch.tensor(d)) for etype, (s, d) in edges.items()}, counts
        )
        self._set_labels(g, folder, numbers)
        return g

    def _set_labels(self, g: Graph, folder: Path, numbers: dict[str, tuple[str, int]]) -> None:
        num_nodes, data = g.num_nodes(self.predict_category), g.nodes[self.predict_category].data
        labels, classes = torch.full((num_nodes,), -1), dict[str, int]()
        for file, name in zip(_SPLITS, ("train_mask", "test_mask"), strict=True):
            mask = torch.zeros(num_nodes, dtype=torch.bool)
            for line in read_text_regular(folder / file).splitlines()[1:]:
                columns = line.strip().split("\t")
                if len(columns) < 3:
                    raise GraphValueError(f"{folder / file} has a line without 3 columns: {line!r}")
                entity_at, class_at = self._columns
                entity = self.parse_entity(Term("iri", columns[entity_at]))
                key = "" if entity is None else f"{entity.cls}/{entity.id}"
                ntype, node = numbers.get(key, (None, -1))
                if ntype != self.predict_category:
                    self._say(f"{columns[entity_at]} has no edges and is left out")
                    continue
                mask[node] = True
                labels[node] = classes.setdefault(columns[class_at], len(classes))
            data[name] = mask
        data["labels"] = data["label"] = labels


class AIFBDataset(RDFGraphDataset):
    """People, projects and publications of an institute; labels are groups of ``Personen``."""

    _entities, _relations = "http://www.aifb.uni-karlsruhe.de/", "http://swrc.ontoware.org/"
    _left_out = (f"{_relations}ontology#employs", f"{_relations}ontology#affiliation")

    _title, predict_category = "aifb-hetero", "Personen"

    def parse_entity(self, term: Term) -> Entity | None:
        """Literals, and what the institute's server names by type."""
        if term.kind == "literal":
            return Entity(term.text, "_Literal")
        words = term.text.split("/")
        if term.kind == "blank" or not term.text.startswith(self._entities) or len(words) < 6:
            return None
        return Entity(words[5], words[3])

    def parse_relation(self, term: Term) -> str | None:
        """All but the two that tell the group."""
        if term.text in self._left_out:
            return None
        return term.text.split("/")[3 if term.text.startswith(self._relations) else -1]


class MUTAGDataset(RDFGraphDataset):
    """Molecules, their atoms and bonds; labels say which of ``d`` (compounds) are mutagenic."""

    _prefix = "http://dl-learner.org/carcinogenesis#"

    _title, predict_category = "mutag-hetero", "d"

    def parse_entity(self, term: Term) -> Entity | None:
        """Literals, compounds, bonds, and things whose type their edges tell."""
        if term.kind == "literal":
            return Entity(term.text, "_Literal")
        if term.kind == "blank" or not term.text.startswith(self._prefix):
            return None
        name = term.text[len(self._prefix) :]
        numbered = re.match(r"(d|bond)[0-9]", name)
        return Entity(name, numbered[1] if numbered else None)

    def parse_relation(self, term: Term) -> str | None:
        """All but the one that tells the label."""
        if term.text == f"{self._prefix}isMutagenic":
            return None
        if term.text.startswith(self._prefix):
            return term.text[len(self._prefix) :]
        return term.text.split("/")[-1]

    def typed(
        self, triple: tuple[Term, Term, Term], ends: tuple[Entity, Entity], relation: str
    ) -> tuple[Entity, Entity]:
        """What a schema speaks of is of type SCHEMA; an end without type has the relation's."""
        subject, target = ends
        if not triple[1].text.startswith(self._prefix):
            target = target._replace(cls="SCHEMA")
            subject = subject._replace(cls=subject.cls or "SCHEMA")
        if subject.cls is None:
            raise GraphValueError(f"the entity {subject.id!r} is of no type that is known")
        return subject, target._replace(cls=target.cls or relation)


class BGSDataset(RDFGraphDataset):
    """Rock units of a geological survey; labels are their lithogenesis."""

    _prefix = "http://data.bgs.ac.uk/"

    _title, predict_category, _columns = "bgs-hetero", "Lexicon_NamedRockUnit", (1, 2)

    def parse_entity(self, term: Term) -> Entity | None:
        """What the survey names by concept, besides the status of terms."""
        words = term.text.split("/")
        is_named = term.kind == "iri" and term.text.startswith(self._prefix) and len(words) == 7
        if not is_named or term.text.startswith(f"{self._prefix}ref/CurrentStatus"):
            return None
        return Entity(words[6], f"{words[4]}/{words[5]}")

    def parse_relation(self, term: Term) -> str | None:
        """All but the one that tells the label."""
        if term.text == f"{self._prefix}ref/Lexicon/hasLithogenesis":
            return None
        if term.text.startswith(f"{self._prefix}ref"):
            words = term.text.split("/")
            return f"{words[4]}/{words[5]}" if len(words) >= 6 else None
        return term.text.replace(".", "_")


class AMDataset(RDFGraphDataset):
    """Artifacts of a museum; labels are the categories of ``proxy``."""

    _prefix = "http://purl.org/collections/nl/am/"

    _title, predict_category = "am-hetero", "proxy"
    _left_out = (f"{_prefix}objectCategory", f"{_prefix}material")

    def parse_entity(self, term: Term) -> Entity | None:
        """What the museum names by type, and blank nodes."""
        if term.kind == "blank":
            return Entity(term.text, "_BNode")
        words = term.text.split("/")
        if term.kind == "literal" or not term.text.startswith(self._prefix) or len(words) != 7:
            return None
        parts = words[6].split("-")
        return Entity(parts[1], parts[0]) if len(parts) == 2 else Entity(words[6], "TYPE")

    def parse_relation(self, term: Term) -> str | None:
        """All but the two that tell the label."""
        if term.text in self._left_out:
            return None
        if term.text.startswith(self._prefix):
            return term.text.split("/")[6]
        return term.text.replace(".", "_")


def _type_name(name: str | None) -> str:
    """A name that files can hold: DGL's has slashes and colons in some."""
    assert name is not None
    return re.sub(r"[/:~]", "_", name)


def read_triples(path: Path) -> Iterator[tuple[Term, Term, Term]]:
    """The triples of a file of N-Triples; comments and empty lines are left out.

    Source: https://www.w3.org/TR/n-triples/.

    Raises:
        ValueError: A line is no triple.
    """
    with open_regular(path, "r") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            parts = _TRIPLE.fullmatch(line.rstrip("\r\n"))
            if parts is None:
                raise GraphValueError(
                    f"line {number} of {path} is not one triple of N-Triples ({line[:60]!r}); "
                    "convert the file to N-Triples"
                )
            yield _term(parts[1], parts[2]), _term(parts[3]), _term(parts[4], parts[5], parts[6])


def _term(iri: str | None, blank: str | None = None, literal: str | None = None) -> Term:
    if blank is not None:
        return Term("blank", blank[2:])
    return Term("literal", _unescaped(literal)) if iri is None else Term("iri", _unescaped(iri))


def _unescaped(text: str | None) -> str:
    assert text is not None
    return _ESCAPE.sub(
        lambda m: chr(int(m[1] or m[2], 16)) if m[3] is None else _ESCAPED.get(m[3], m[3]), text
    )
