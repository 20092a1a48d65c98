"""The errors that end a command, each with its exit code.

::

    OpenDiLoCoError                  1  anything unexpected
    +-- ConfigError                  2  wrong usage or configuration
    +-- JoinError                    3  cannot join the swarm
    |   +-- FingerprintError         3  the swarm trains something else
    +-- SwarmLostError               4  the swarm side is beyond repair
    +-- SchemaMismatchError          1  tensors of another model
    +-- StateUnavailableError        1  no donor gave a usable state
"""


class OpenDiLoCoError(Exception):
    """Base of all errors of this project; the message is one line for the user."""

    exit_code = 1


class ConfigError(OpenDiLoCoError):
    """A setting is wrong; the message names it and the remedy."""

    exit_code = 2


class JoinError(OpenDiLoCoError):
    """The swarm cannot be joined."""

    exit_code = 3


class FingerprintError(JoinError):
    """The swarm was started with other settings; the message names the field."""


class SwarmLostError(OpenDiLoCoError):
    """The DHT, averager or p2p daemon is gone and could not be brought back."""

    exit_code = 4


class SchemaMismatchError(OpenDiLoCoError):
    """Tensors do not have the names or shapes of this run's model."""


class StateUnavailableError(OpenDiLoCoError):
    """No peer gave a state that checks out."""
