"""Groups of options: set by methods, read as attributes; copied, compared, printed and frozen."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from ipu_pipeline.poptorch import logs

T = TypeVar("T")
P = ParamSpec("P")
GroupT = TypeVar("GroupT", bound="OptionGroup")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

UNSET: Final = object()


class Option(Generic[T]):
    """An option of a group: an attribute that can be read and set, and the method that sets it.

    Attributes:
      name: the name that the option is read by.
      check: checks a value, and returns the value that is kept.
      default: the first value. UNSET: none, and reading the option before it is set is an error.
      no_effect: why the option changes nothing on JAX devices; empty if it does change something.
      neutral: the value that asks for nothing, and so needs no warning; by default the default.

    Example:
      device_iterations = Option(checks.integer(1), 1)

      @device_iterations.setter
      def deviceIterations(self, device_iterations: int) -> None:
          '''How many weight updates there are per call.'''
    """

    name: str

    def __init__(
        self,
        check: Callable[[str, Any], T],
        default: Any = UNSET,
        *,
        no_effect: str = "",
        neutral: Any = UNSET,
        doc: str = "",
    ) -> None:
        """Takes its attributes, and the documentation of an option that no `setter` documents."""
        self.check, self.default, self.no_effect = check, default, no_effect
        self.neutral = default if neutral is UNSET else neutral
        self.__doc__ = doc

    def setter(
        self, method: Callable[Concatenate[Any, P], None]
    ) -> Callable[Concatenate[GroupT, P], GroupT]:
        """Makes the method that sets the option and returns the group.

        Args:
          method: gives the setter its name, argument and documentation. It does nothing itself. An option
            that is not an attribute of its group is read by the name of the method.
        """

        @functools.wraps(method)
        def set_option(*args: Any, **kwargs: Any) -> Any:
            method(*args, **kwargs)  # raises for arguments that are not its own
            group, value, *_ = *args, *kwargs.values(), *(method.__defaults__ or ())
            return group.set(**{self.name: value})

        text = inspect.cleandoc(method.__doc__ or "")
        self.name = method.__name__
        self.__doc__ = self.__doc__ or text.partition("\n")[0]
        if raises := getattr(self.check, "raises", ""):
            text = f"{text}\n\nRaises:\n  {raises}"
        set_option.__doc__ = text
        set_option.__annotations__["return"] = Self
        vars(set_option)["option"] = self
        return configurable(set_option)

    def asks_in_vain(self, value: Any) -> bool:
        """Whether a value asks for something that has no effect."""
        return bool(self.no_effect) and value != self.neutral

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        if self.default is UNSET:
            self.__doc__ = f"{self.__doc__} No value until it is set."

    @overload
    def __get__(self, group: None, owner: type) -> Self: ...
    @overload
    def __get__(self, group: OptionGroup, owner: type) -> T: ...
    def __get__(self, group: OptionGroup | None, owner: type) -> Any:
        if group is None:
            return self
        try:
            return vars(group)["_values"][self.name]
        except KeyError:
            raise AttributeError(self.name) from None  # OptionGroup.__getattr__ then says why

    def __set__(self, group: OptionGroup, value: T) -> None:
        group.set(**{self.name: value})


def configurable(method: MethodT) -> MethodT:
    """Lets config files call a method."""
    vars(method)["is_configurable"] = True
    return method


def is_configurable(method: Any) -> bool:
    """Whether config files may call a method."""
    return getattr(method, "is_configurable", False) is True


class OptionGroup:
    """Options by name, and groups within the group. Subclasses declare each as an `Option`.

    Attributes:
      path: how a program names the group, for messages.
      settings: the options, by the names that they are read by: a subclass's own, then its bases'.
      groups: the inner groups, by the names that they are read by.
    """

    path: ClassVar[str]
    settings: ClassVar[Mapping[str, Option[Any]]] = {}
    groups: ClassVar[Mapping[str, type[OptionGroup]]] = {}

    _values: dict[str, Any]
    _explicit: set[str]
    _frozen: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings: dict[str, Option[Any]] = {}
        for member in itertools.chain.from_iterable(vars(kind).values() for kind in cls.mro()):
            option = getattr(member, "option", member)
            if isinstance(option, Option):
                settings.setdefault(option.name, option)
        cls.settings = settings

    def __init__(self) -> None:
        """Starts with the defaults."""
        self._values = {
            name: copy.deepcopy(option.default)
            for name, option in self.settings.items()
            if option.default is not UNSET
        }
        self._explicit = set()
        self._frozen = False
        vars(self).update({name: group() for name, group in self.groups.items()})

    def set(self, **values: Any) -> Self:
        """Sets options by the names that they are read by.

        Raises:
          AttributeError: the options are frozen.
          AssertionError: there is no such option, or a value is of a wrong type.
          ValueError: a value is out of range.
        """
        self.check_not_frozen()
        for name, value in values.items():
            if name not in self.settings:
                raise AssertionError(self._describe_unknown(name))
            option = self.settings[name]
            checked_value = option.check(f"{self.path}.{name}", value)
            if option.asks_in_vain(checked_value):
                logs.warn_once(f"{self.path}.{name} has no effect: {option.no_effect}")
            self._values[name] = checked_value
            self._explicit.add(name)
        return self

    def is_set(self, name: str) -> bool:
        """Whether an option was set, even to its default."""
        return name in self._explicit

    def values_by_name(self) -> dict[str, Any]:
        """Returns the options that have a value, without those of inner groups."""
        return dict(self._values)

    def restore(self, name: str, value: Any, is_explicit: bool) -> None:
        """Sets an option back to an earlier value, without a warning that it has no effect.

        Args:
          name: the name that it is read by.
          value: the value, as for `set`.
          is_explicit: whether it had been set.
        """
        self._values[name] = self.settings[name].check(f"{self.path}.{name}", value)
        (self._explicit.add if is_explicit else self._explicit.discard)(name)

    def unset(self, name: str) -> None:
        """Removes the value of an option that has none at first."""
        self._values.pop(name, None)
        self._explicit.discard(name)

    def freeze(self) -> None:
        """Forbids further changes, here and in the inner groups."""
        self._frozen = True
        for name in self.groups:
            vars(self)[name].freeze()

    def check_not_frozen(self) -> None:
        """Raises an AttributeError if the options are frozen."""
        if self._frozen:
            raise AttributeError("Can't modify frozen Options")

    def clone(self) -> Self:
        """Returns a copy that shares nothing with the original and is not frozen."""
        return copy.deepcopy(self)

    def __getattr__(self, name: str) -> Any:
        """Refuses to read an unknown option, or an option without a value."""
        if name in self.settings:
            raise AttributeError(f"{self.path}.{name} has no value yet: nothing has set it.")
        raise AttributeError(self._describe_unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an option, as `set` does."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self.set(**{name: value})

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self.path}.{name} cannot be deleted.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        vars(duplicate).update(copy.deepcopy(vars(self), memo), _frozen=False)
        return duplicate

    def __copy__(self) -> Self:
        return self.clone()  # a shallow one would share its values

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = ["_values", *self.groups]
        return all(vars(self)[name] == vars(other)[name] for name in names)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self._values.items()]
        parts += [f"{name}={vars(self)[name]!r}" for name in self.groups]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _describe_unknown(self, name: str) -> str:
        names = [*self.settings, *self.groups]
        near = difflib.get_close_matches(name, names, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        return f"{self.path} has no option {name!r}.{guess} Options: {', '.join(names)}."
