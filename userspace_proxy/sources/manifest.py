"""Manifests in, Kubernetes objects out; or a ConfigError with file, line, object, field and reason.

Kind and apiVersion together decide what an object is. What the proxy does not use is passed over, so that whole dumps
of a cluster can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from userspace_proxy.core.errors import ConfigError
from userspace_proxy.core.objects import Endpoints, EndpointSlice, KubernetesObject, ObjectKey, Service
from userspace_proxy.sources.documents import Document, decode, documents
from userspace_proxy.sources.validation import faults

_TYPES: Final[dict[tuple[str, str], type[KubernetesObject]]] = {
    ("v1", "Service"): Service,
    ("v1", "Endpoints"): Endpoints,
    ("discovery.k8s.io/v1", "EndpointSlice"): EndpointSlice,
    ("discovery.k8s.io/v1beta1", "EndpointSlice"): EndpointSlice,
}
_LISTS: Final = {("v1", "List"), *((version, f"{kind}List") for version, kind in _TYPES)}
_KINDS_IN_USE: Final = {kind for _, kind in (*_TYPES, *_LISTS)}

_VALIDATION_ERROR = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_EXPECTATION = re.compile(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`")
_WORDS: Final = {
    "object": "a mapping",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a fraction",
    "bool": "true or false",
    "null": "nothing",
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """An object and where it was written: in which document, and at which path inside it."""

    object: KubernetesObject
    document: Document
    path: str = ""

    @property
    def where(self) -> str:
        return self.document.where(self.path)


def parse(text: str | bytes, origin: str) -> list[KubernetesObject]:
    """Return the objects in a text, in their order. `origin` names it in errors. Raises ConfigError alone."""
    return merge(manifest for document in split(text, origin) for manifest in manifests(document))


def split(text: str | bytes, origin: str) -> Iterator[Document]:
    """Yield the documents of a file's content. Raises ConfigError when it is no text."""
    yield from documents(decode(text, origin) if isinstance(text, bytes) else text, origin)


def manifests(document: Document) -> list[Manifest]:
    """Return the objects in a document: one, those of a list, or none that the proxy uses. Raises ConfigError."""
    value = document.value()
    return [] if value is None else list(_objects(value, document, path=""))


def merge(found: Iterable[Manifest]) -> list[KubernetesObject]:
    """Return the objects, one that is there twice once. Raises ConfigError where two have one name but differ."""
    by_name: dict[tuple[type[KubernetesObject], ObjectKey], Manifest] = {}
    for manifest in found:
        first = by_name.setdefault((type(manifest.object), manifest.object.key), manifest)
        if first is not manifest and first.object != manifest.object:
            subject = f"{type(manifest.object).__name__} {manifest.object.key}"
            raise ConfigError(f"already defined otherwise in {first.where}", where=manifest.where, subject=subject)
    return [manifest.object for manifest in by_name.values()]


def _objects(
    value: object, document: Document, path: str, inherited: tuple[object, object] = (None, None)
) -> Iterator[Manifest]:
    """Yield the objects in a value at `path`. Items of a typed list inherit what they are from the list."""
    if not isinstance(value, dict):
        _fail("a Kubernetes object is a mapping", document, path)
    version, kind = value.get("apiVersion", inherited[0]), value.get("kind", inherited[1])
    if not (kind and isinstance(kind, str)):
        _fail("missing: it says which kind of object this is", document, path, field="kind")
    if kind not in _KINDS_IN_USE:
        return
    if not (version and isinstance(version, str)):
        _fail(f"missing: it says which {kind} this is", document, path, subject=kind, field="apiVersion")
    if (version, kind) in _LISTS:
        if path:
            _fail("a list within a list is not supported", document, path, subject=kind)
        yield from _items(value, document, (version, kind))
    elif found := _TYPES.get((version, kind)):
        yield Manifest(_decode(value, found, document, path), document, path)


def _items(mapping: dict[str, object], document: Document, listed: tuple[str, str]) -> Iterator[Manifest]:
    version, kind = listed
    items = mapping.get("items") or []
    if not isinstance(items, list):
        _fail("expected a list", document, "", subject=kind, field="items")
    inherited = (None, None) if kind == "List" else (version, kind.removesuffix("List"))
    for index, item in enumerate(items):
        yield from _objects(item, document, f"items[{index}]", inherited)


def _decode(
    mapping: dict[str, object], found: type[KubernetesObject], document: Document, path: str
) -> KubernetesObject:
    try:
        decoded = msgspec.convert(mapping, found)
    except msgspec.ValidationError as error:
        match = _VALIDATION_ERROR.fullmatch(str(error))
        reason, field = (match["reason"], match["path"] or "") if match else (str(error), "")
        _fail(_in_words(reason), document, path, subject=_subject(found, mapping), field=field)
    for fault in faults(decoded):
        _fail(fault.reason, document, path, subject=_subject(found, mapping), field=fault.field)
    return decoded


def _subject(found: type[KubernetesObject], mapping: dict[str, object]) -> str:
    """Return `Service default/web` of an object that may be at fault, as far as it says who it is."""
    metadata = mapping.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    name, namespace = named.get("name"), named.get("namespace") or "default"
    if not (name and isinstance(name, str) and isinstance(namespace, str)):
        return found.__name__
    key = f"{namespace}/{name}"
    return f"{found.__name__} {key if key.isascii() and key.isprintable() and len(key) < 400 else ascii(key)[:400]}"


def _in_words(reason: str) -> str:
    """Return a complaint of the decoder in the words of someone who writes YAML."""
    match = _EXPECTATION.fullmatch(reason)
    if not match:
        return reason
    expected, got = (_WORDS.get(word, word) for word in match.groups())
    hint = " (put it in quotes)" if match[1] == "str" and match[2] in ("int", "float", "bool") else ""
    return f"expected {expected}, got {got}{hint}"


def _fail(reason: str, document: Document, path: str, *, subject: str = "", field: str = "") -> NoReturn:
    full_path = f"{path}.{field}" if path and field else path or field
    raise ConfigError(reason, where=document.where(full_path), subject=subject, field=field.removesuffix("[...]"))
