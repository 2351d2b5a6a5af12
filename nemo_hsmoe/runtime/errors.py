"""Errors a user can act on."""


class ConfigurationError(ValueError):
    """A setting that cannot work, told in one line.

    Args:
        name: the argument as the user writes it.
        value: what was given.
        expected: what would be right.
    """

    def __init__(self, name: str, value: object, expected: str):
        self.name = name
        self.value = value
        self.expected = expected
        super().__init__(f"{name}={value!r}: {expected}")

    def __reduce__(self):
        return type(self), (self.name, self.value, self.expected)


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise `ConfigurationError(name, value, expected)` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(name, value, expected)
