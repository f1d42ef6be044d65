"""Parts by name: decorators, default names, refusals."""

import pytest

from titans_jax.registry import Registry, registrations, snake_case


@pytest.fixture
def parts():
    registry = Registry("part")

    @registry.register()
    def plain():
        return 1

    @registry.register("other_name")
    class Other:
        pass

    registry.add("elsewhere", 3, "elsewhere.py")
    return registry


def test_names_are_the_parts_own_or_given(parts):
    assert list(parts) == ["plain", "other_name", "elsewhere"] and len(parts) == 3
    assert parts["plain"]() == 1 and parts["other_name"].__name__ == "Other"
    assert "plain" in parts and "plane" not in parts and parts.get("plane") is None


@pytest.mark.parametrize("name, snake", [("NormPower", "norm_power"), ("L2", "l2"), ("FDivergence", "f_divergence")])
def test_a_class_is_named_with_underscores(name, snake):
    assert snake_case(name) == snake


def test_an_unknown_name_is_refused_with_the_nearest(parts):
    with pytest.raises(ValueError) as error:
        parts["plane"]
    sentence = "there is no part 'plane'; did you mean plain?; there are plain, other_name, elsewhere."
    assert str(error.value) == sentence


def test_a_taken_name_is_refused(parts):
    sentence = r"^the part 'elsewhere' is there already: register this one under another name\.$"
    with pytest.raises(ValueError, match=sentence):
        parts.register("elsewhere")(4)


def test_a_file_may_register_again(parts):
    before = registrations()
    parts.add("elsewhere", 4, "elsewhere.py")
    assert parts["elsewhere"] == 4 and registrations() == before + 1


def test_a_decorator_without_parentheses_is_refused(parts):
    with pytest.raises(ValueError, match="parentheses"):
        parts.register(len)
