"""The plugin: hooks that name fewer arguments than they are given, and a spec by keywords."""

from attnx.plugin import BackendSpec, hookimpl

PLANNED = []


def load_lane():
    from ._backend import LANE

    return LANE


def load():
    from ._backend import First

    return First()


@hookimpl
def attnx_backends():
    return [
        BackendSpec(
            name="first",
            api_version=1,
            load=load,
            lane=load_lane,
            array_types=("array_api_strict._array_object.Array",),
            requires=("array_api_strict",),
            summary="one dense product, as an author wrote it for version 1",
            install_hint="pip install array-api-strict",
            settings=("ATTNX_FIRST_TILE",),
        )
    ]


@hookimpl
def attnx_rank(candidates):
    return ["first"] if "first" in candidates else None


@hookimpl
def attnx_planned(plan):
    PLANNED.append(plan)


@hookimpl
def attnx_conformance_cases():
    return []
