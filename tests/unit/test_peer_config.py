"""What a peer can be told, and what it refuses."""

from pathlib import Path

import pytest

from bootstrap.config import BootstrapConfig
from opendiloco.errors import ConfigError
from opendiloco.settings import Settings, load_settings
from opendiloco.sources import settings_of
from peers.config import AveragingConfig, PeerConfig

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}"

KEYS = """
run_id new_swarm initial_peers out_dir name seed device log_every debug
model.preset model.config
data.sources data.tokenizer data.seq_len data.cache_dir
inner.lr inner.weight_decay inner.beta1 inner.beta2 inner.max_grad_norm inner.warmup_steps
inner.total_steps inner.min_lr_ratio inner.batch_size inner.micro_batch_size inner.precision
diloco.inner_steps diloco.outer_lr diloco.outer_momentum diloco.outer_steps diloco.weighting
diloco.on_missed_round diloco.num_fragments diloco.overlap_steps
averaging.codec averaging.matchmaking_s averaging.wait_s averaging.stall_timeout_s
averaging.exchange_timeout_s averaging.attempts
network.host network.port network.announce network.identity network.relay network.client_mode
network.join_timeout_s network.heartbeat_s network.peer_timeout_s network.min_peers
"""


def load(*argv: str, **environ: str) -> PeerConfig:
    return load_settings(PeerConfig, argv, prog="opendiloco peer", environ=environ)


def complaint(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_setting_appears_or_disappears_unnoticed() -> None:
    settings = [setting.key for setting in settings_of(PeerConfig)]

    assert settings == KEYS.split()


def test_every_setting_has_a_description() -> None:
    settings = list(settings_of(PeerConfig))

    assert [setting.key for setting in settings if not setting.info.description] == []


def test_the_defaults_are_the_published_recipe() -> None:
    config = load("--new-swarm")

    inner, diloco = config.inner, config.diloco
    assert (inner.lr, inner.weight_decay, inner.beta1, inner.beta2) == (4e-4, 0.1, 0.9, 0.95)
    assert (inner.max_grad_norm, inner.warmup_steps, inner.total_steps) == (1.0, 1000, 88000)
    assert (inner.min_lr_ratio, diloco.outer_lr, diloco.outer_momentum) == (0.0, 0.7, 0.9)


def test_an_address_to_join_by_is_enough() -> None:
    config = load("--initial-peers", ADDRESS)

    assert config.initial_peers == [ADDRESS]


@pytest.mark.parametrize(
    "address",
    [
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER_ID}",
        f"/dns/peer.example.org/tcp/1/p2p/{PEER_ID}",
        f"/dns4/peer.example.org/tcp/1/p2p/{PEER_ID}",
        f"/dns6/peer.example.org/tcp/1/p2p/{PEER_ID}",
    ],
)
def test_other_kinds_of_hosts_are_taken(address: str) -> None:
    config = load("--initial-peers", address)

    assert config.initial_peers == [address]


def test_whitespace_around_an_address_is_removed() -> None:
    config = load(OPENDILOCO_INITIAL_PEERS=f" {ADDRESS} ,\n{ADDRESS}\n")

    assert config.initial_peers == [ADDRESS, ADDRESS]


@pytest.mark.parametrize(
    "address",
    [
        "hello",
        "/ip/1.2.3.4/tcp/1/p2p/X",
        "/ip4/1.2.3.4/tcp/31337",
        f"/ip4/1.2.3/tcp/31337/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/tcp/0/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/udp/1/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/ tcp/1/p2p/{PEER_ID}",
        "/ip4/1.2.3.4/tcp/1/p2p/notapeerid",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    message = complaint("--initial-peers", address)

    assert message.startswith(f"--initial-peers: '{address}': ")
    assert "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm" in message


def test_a_wrong_address_in_the_environment_is_blamed_on_the_environment() -> None:
    message = complaint(OPENDILOCO_INITIAL_PEERS="hello")

    assert message.startswith("OPENDILOCO_INITIAL_PEERS: 'hello': it must begin with /")


def test_a_peer_without_a_way_in_is_told_how_to_found_a_swarm() -> None:
    message = complaint()

    assert message.startswith("--initial-peers is missing")
    assert "--new-swarm" in message


@pytest.mark.parametrize(
    "argv",
    [["--initial-peers"], ["--initial-peers", ""], ["--new-swarm", "--initial-peers", ""]],
)
def test_an_unset_shell_variable_never_founds_a_second_swarm(argv: list[str]) -> None:
    message = complaint(*argv)

    assert message.startswith("--initial-peers: the list is empty")
    assert "--new-swarm" in message


def test_an_empty_environment_variable_never_founds_a_second_swarm() -> None:
    message = complaint(OPENDILOCO_INITIAL_PEERS="")

    assert message.startswith("OPENDILOCO_INITIAL_PEERS: the list is empty")


def test_joining_and_founding_at_once_is_refused() -> None:
    message = complaint("--initial-peers", ADDRESS, "--new-swarm")

    assert message.startswith("--initial-peers and --new-swarm exclude each other")


@pytest.mark.parametrize("run_id", ["a.b", "a b", "ä", "a/b", "x" * 65])
def test_a_run_id_that_hivemind_cannot_use_is_refused(run_id: str) -> None:
    message = complaint("--new-swarm", "--run-id", run_id)

    assert message == f"--run-id: {run_id!r} must be 1 to 64 letters, digits, - and _"


def test_a_run_id_may_have_64_letters_digits_and_dashes() -> None:
    run_id = "aZ09_-" + "x" * 58

    config = load("--new-swarm", "--run-id", run_id)

    assert config.run_id == run_id


@pytest.mark.parametrize("name", ["x" * 41, "a\tb", "\x1b[31mred"])
def test_a_name_that_would_spoil_a_table_is_refused(name: str) -> None:
    message = complaint("--new-swarm", "--name", name)

    assert message == f"--name: {name!r} must be 1 to 40 printable characters"


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:7"])
def test_a_known_device_is_taken(device: str) -> None:
    config = load("--new-swarm", "--device", device)

    assert config.device == device


def test_an_unknown_device_is_refused() -> None:
    message = complaint("--new-swarm", "--device", "gpu")

    assert message == "--device: 'gpu' must be auto, cpu, cuda, cuda:N or mps"


def test_a_batch_that_cannot_be_split_evenly_is_refused() -> None:
    message = complaint("--new-swarm", "--inner.batch-size", "12")

    assert message == (
        "--inner.micro-batch-size: 8 does not divide --inner.batch-size, 12; choose two that fit"
    )


def test_a_schedule_that_ends_during_its_warm_up_is_refused() -> None:
    message = complaint("--new-swarm", "--inner.total-steps", "500")

    assert message == (
        "--inner.total-steps: 500 steps end before the warm-up does; "
        "raise it or lower --inner.warmup-steps, 1000"
    )


def test_a_peer_timeout_of_two_heartbeats_is_refused() -> None:
    message = complaint("--new-swarm", "--network.heartbeat-s", "4")

    assert message == (
        "--network.peer-timeout-s: 8.0 is too short; "
        "it must be more than twice --network.heartbeat-s, 4.0"
    )


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--diloco.num-fragments", "2", "2 is not yet supported; use 1"),
        ("--diloco.overlap-steps", "1", "1 is not yet supported; use 0"),
        ("--diloco.inner-steps", "0", "must be at least 1 (got 0)"),
        ("--inner.lr", "inf", "must be a finite number (got inf)"),
        ("--network.port", "65536", "must be at most 65535 (got 65536)"),
        ("--averaging.codec", "fp8", "must be 'fp16', 'int8' or 'none' (got fp8)"),
    ],
)
def test_a_value_out_of_bounds_is_refused(option: str, value: str, line: str) -> None:
    message = complaint("--new-swarm", option, value)

    assert message == f"{option}: {line}"


def test_a_host_name_is_nothing_to_listen_on() -> None:
    message = complaint("--new-swarm", "--network.host", "localhost")

    assert message.startswith("--network.host: 'localhost' is no IP address; use 0.0.0.0")


def test_announcing_a_host_without_a_port_is_refused() -> None:
    message = complaint("--new-swarm", "--network.announce", "203.0.113.7")

    assert message == (
        "--network.announce: 203.0.113.7 needs a fixed port to announce; set --network.port"
    )


def test_announcing_port_0_is_refused() -> None:
    message = complaint("--new-swarm", "--network.announce", "/ip4/203.0.113.7/tcp/0")

    assert message.startswith("--network.announce: '/ip4/203.0.113.7/tcp/0': '0' is no port")


def test_no_source_of_text_is_refused() -> None:
    message = complaint("--new-swarm", "--data.sources")

    assert message == ("--data.sources: the list is empty; give text files or folders, or stdlib")


def test_a_tilde_means_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")

    config = load("--new-swarm", OPENDILOCO_OUT_DIR="~/runs")

    assert config.out_dir == Path("/home/ada/runs")
    assert config.data.cache_dir == Path("/home/ada/.cache/opendiloco")


def test_the_home_folder_of_nobody_is_refused() -> None:
    message = complaint("--new-swarm", "--out-dir", "~nosuchuser/runs")

    assert message.startswith("--out-dir: ~nosuchuser/runs: ")


def test_the_key_lies_in_the_folder_of_the_run_unless_told_otherwise() -> None:
    own = load("--new-swarm", "--out-dir", "/runs/1")
    other = load("--new-swarm", "--out-dir", "/runs/1", "--network.identity", "/keys/1")

    assert (own.identity_path, other.identity_path) == (
        Path("/runs/1/identity.key"),
        Path("/keys/1"),
    )


def test_a_round_may_take_the_wait_and_every_attempt() -> None:
    averaging = AveragingConfig(wait_s=7, attempts=2, matchmaking_s=3, exchange_timeout_s=11)

    config = PeerConfig(new_swarm=True, averaging=averaging)

    assert config.round_timeout_s == 7 + 2 * (3 + 3 + 11)


def test_what_is_right_is_kept_as_it_was_given() -> None:
    argv = ["--network.port", "1", "--network.announce", "203.0.113.7", "--data.sources", "a", "b"]

    config = load("--new-swarm", "--name", "Ada's box", *argv)

    assert (config.name, config.data.sources) == ("Ada's box", ["a", "b"])
    assert config.network.announce == ["203.0.113.7"]


@pytest.mark.parametrize(
    ("own", "other"), [(PeerConfig, BootstrapConfig), (BootstrapConfig, PeerConfig)]
)
def test_the_environment_of_the_other_command_is_never_taken_for_a_typo(
    own: type[Settings], other: type[Settings]
) -> None:
    known = {setting.env for setting in settings_of(own)}
    environ = {setting.env: "1" for setting in settings_of(other) if setting.env not in known}
    argv = ["--initial-peers", ADDRESS]

    config = load_settings(own, argv, prog="opendiloco", environ=environ)

    assert config == load_settings(own, argv, prog="opendiloco", environ={})
