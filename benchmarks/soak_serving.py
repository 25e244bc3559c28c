"""Serving while its processes are killed, its bundle is swapped, its labels change and nonsense is sent to it.

    python benchmarks/soak_serving.py                     # everything that is not done yet: half an hour
    python benchmarks/soak_serving.py --minutes 2         # a piece of it; the next call goes on from there
    python benchmarks/soak_serving.py --part labels       # one part
    python benchmarks/soak_serving.py --fresh             # from the beginning

    kills     20,000 searches, a replica of some part killed every 10 s; single and composed mode
    swaps     20 hot swaps under load; every answer must be wholly of one version
    labels    2,000 random adds, updates and deletes over HTTP, the server killed 30 times and started again
    writers   50 writers of one label log killed at random moments; the log and its copy must hold what was acknowledged
    damage    600 flipped bits and every truncation of a label log: read exactly, or refused with a reason
    bodies    15,000 requests: random ones that OpenAPI allows, and good ones with some bytes replaced
    heads     5,000 requests over sockets, whose request line and headers have pieces put in at random

What each call did is one line in a ledger in the benchmarks' cache; the table sums the lines. Correctness only: it
may run on a busy machine.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import data_sets
from common import new_parser, provenance, refuse_if_busy, write_table
from label_writer import Writer
from load import free_port
from ray import serve
from soak_pieces import Clock, Piece
from xmcray_serve import Server

from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.serving.run import serving
from xmcray.serving.settings import ServeConfig

# The tests do a little of this, with the same means.
sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import write_bundle_of, write_transformer
from fuzz import ROUTES, ask_described, ask_heads, ask_mutated
from operations import ALL, COMMITS, flipped, interrupted, kill_writers, opened, written
from replicas import Askers, Killer, client_of, insist, known_answers, replicas

LEDGER = data_sets.CACHE / "serve" / "soak.jsonl"
ROUND = 500  # bodies between two looks at the memory
WRITERS = 2
SERVER_KILLS = 30
SERVER_KILL_S = 8.0  # about half of it is the next start
TWO = {"num_replicas": 2}


@dataclass(frozen=True)
class Part:
    """A kind of disturbance.

    Attributes:
        run: from an empty piece, a temporary folder, how much is left to do and the time for it, to the piece.
        goal: how much is to be done.
        what: is counted.
        disturbed_by: what the disturbances are.
    """

    run: Callable[[Piece, Path, int, Clock], Piece]
    goal: int
    what: str
    disturbed_by: str


def main() -> None:
    parser = new_parser(__doc__, out="soak_serving.md")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="of this call, without starting and ending",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls did")
    options = parser.parse_args()
    refuse_if_busy(anyway=True)
    LEDGER.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        LEDGER.unlink(missing_ok=True)
    clock = Clock(60 * options.minutes)
    for name in options.part:
        part = PARTS[name]
        num_done = sum(piece.done for piece in pieces(name))
        left = part.goal - num_done
        if left <= 0 or clock.left_s <= 0:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="xmcray-soak.") as folder:
            piece = part.run(Piece(name), Path(folder), left, clock)
        piece.seconds = round(time.monotonic() - began, 1)
        piece.about = provenance()[1]
        with LEDGER.open("a") as ledger:
            ledger.write(json.dumps(vars(piece)) + "\n")
        print(piece, flush=True)
    write_results(options.out)


def pieces(part: str) -> list[Piece]:
    """What earlier calls did of a part."""
    lines = LEDGER.read_text().splitlines() if LEDGER.is_file() else []
    all_pieces = [Piece(**json.loads(line)) for line in lines]
    return [piece for piece in all_pieces if piece.part == part]


def write_results(out: Path) -> None:
    """Writes the table of everything in the ledger.

    Raises:
        SystemExit: something went wrong in some piece.
    """
    rows: list[list[object]] = []
    num_mistakes = 0
    # A dictionary keeps the order, and each commit once.
    commits: dict[str, None] = {}
    for name, part in PARTS.items():
        part_pieces = pieces(name)
        for piece in part_pieces:
            commit_and_day = piece.about.split(", `")[0]
            commits[commit_and_day] = None
        num_mistakes += mistakes_of(part_pieces).total()
        rows.append(row(name, part, part_pieces))
    header = ["part", "what", "done", "disturbed by", "seconds", "outcome", "seen"]
    notes = [
        f"run in pieces at: {'; '.join(commits) or '-'}",
        "correctness only: the machine may have been busy",
    ]
    write_table(out, "Serving while it is disturbed", header, rows, notes)
    if num_mistakes:
        raise SystemExit("error: something went wrong; see the table")


def row(name: str, part: Part, part_pieces: Sequence[Piece]) -> list[object]:
    """The row of the table for a part: the sums of its pieces."""
    done = sum(piece.done for piece in part_pieces)
    disturbances = sum(piece.disturbances for piece in part_pieces)
    seconds = sum(piece.seconds for piece in part_pieces)
    counts = mistakes_of(part_pieces).items()
    mistakes = [f"{count} x {mistake}" for mistake, count in counts if count]
    if not part_pieces:
        outcome = "not run"
    elif mistakes:
        outcome = f"wrong: {', '.join(mistakes)}"
    else:
        outcome = "nothing wrong"
    if part_pieces and done < part.goal:
        outcome += f", {part.goal - done:,} to do"
    # The same note of several pieces stands there once.
    notes = dict.fromkeys(piece.notes for piece in part_pieces if piece.notes)
    return [
        name,
        part.what,
        f"{done:,} of {part.goal:,}",
        f"{disturbances} {part.disturbed_by}",
        f"{seconds:.0f}",
        outcome,
        "; ".join(notes) or "-",
    ]


def mistakes_of(part_pieces: Sequence[Piece]) -> Counter[str]:
    """What must not have happened in some pieces, and how often it did."""
    mistakes = Counter[str]()
    for piece in part_pieces:
        mistakes.update(piece.wrong)
    return mistakes


# ---- searches ----


def kills(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Half of the searches in each mode."""
    bundles = {
        "single": write_bundle_of(folder / "bundle", "texts"),
        "composed": write_transformer(folder),
    }
    notes = []
    deployments_of_mode = {"single": ["Gateway"], "composed": ["Gateway", "Encoder", "Searcher0"]}
    modes_left = len(deployments_of_mode)
    for mode, deployments in deployments_of_mode.items():
        # The number of gateways is a setting of its own.
        options = dict.fromkeys(deployments[1:], TWO)
        config = ServeConfig(
            bundles={"a": str(bundles[mode])},
            mode=mode,
            replicas=2,
            state_dir=str(folder / mode),
            options=options,
        )
        # The modes that are left share the time and the searches that are left.
        share = 1 / modes_left
        num_searches = (left - piece.done) // modes_left
        modes_left -= 1
        port = free_port()
        with serving(config, "127.0.0.1", port) as url, clock.working(share) as deadline:
            began = time.monotonic()
            askers = Askers(url, folder / mode, known_answers([bundles[mode]]))
            killer = Killer(partial(spare, deployments), 10.0, seed=port)
            askers.finish(num_searches, deadline)
            killer.close()
            seconds = time.monotonic() - began
        count(piece, askers)
        piece.disturbances += len(killer.killed)
        notes.append(f"{mode}: {askers.asked:,} in {seconds:.0f} s, {len(killer.killed)} kills")
    piece.notes = ", ".join(notes)
    return piece


def spare(deployments: Sequence[str]) -> list[int]:
    """Replicas that may be killed; none while another replica of a deployment is down."""
    status = serve.status().applications["xmcray"].deployments
    pids = []
    for name in deployments:
        if status[name].replica_states != {"RUNNING": 2}:
            return []
        pids += replicas(name)
    return pids


def swaps(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Between two bundles, one of which has a label more."""
    bundles = [write_bundle_of(folder / "bundle", "texts"), folder / "other"]
    add_labels(bundles[0], [NewLabel("extra", "matrix vector norm")], bundles[1])
    expected_answers = known_answers(bundles)
    config = ServeConfig(
        bundles={"a": str(bundles[0])},
        mode="single",
        replicas=2,
        state_dir=str(folder / "state"),
        keep_s=5.0,
    )
    with (
        serving(config, "127.0.0.1", free_port()) as url,
        client_of(url, folder / "state") as admin,
        clock.working() as deadline,
    ):
        askers = Askers(url, folder / "state", expected_answers)
        while piece.disturbances < left and time.monotonic() < deadline:
            piece.disturbances += 1
            next_bundle = bundles[piece.disturbances % 2]
            insist(partial(admin.swap, str(next_bundle)))
            # Answers of this version, while the one before is dropped.
            enough = askers.asked + 50
            while askers.asked < enough:
                time.sleep(0.05)
        askers.finish()
    count(piece, askers)
    piece.done = piece.disturbances
    # Without a swap there was no time to see both.
    if piece.disturbances:
        piece.wrong["version never seen"] += len(expected_answers) - len(askers.seen)
    piece.notes = f"{askers.asked:,} searches meanwhile"
    return piece


def count(piece: Piece, askers: Askers) -> None:
    """Adds what the askers saw."""
    piece.done += askers.asked
    piece.wrong["failed"] += len(askers.failed)
    piece.wrong["mixed answer"] += len(askers.mixed)
    for error in askers.failed[:5]:
        print("failed:", error, file=sys.stderr)


# ---- labels ----


def labels(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """The whole server is killed: coordinator, gateway and log in one process."""
    state = folder / "state"
    server = Server(write_bundle_of(folder / "bundle", "texts"), state)
    try:
        url = f"http://127.0.0.1:{server.port}"
        clients = [client_of(url, state) for _ in range(WRITERS)]
        writers = [Writer(client, i, seed=left + i) for i, client in enumerate(clients)]
        killer = Killer(server.running, SERVER_KILL_S)
        with clock.working() as deadline:
            while time.monotonic() < deadline:
                acknowledged = sum(writer.acknowledged for writer in writers)
                if acknowledged >= left and len(killer.killed) >= SERVER_KILLS:
                    break
                server.revive()
                time.sleep(0.2)
        killer.close()
        server.revive()
        for writer in writers:
            writer.done.set()
            writer.join()
        server.close()
        server.revive()  # once more from what is on the disk
        for writer in writers:
            writer.check()
            piece.done += writer.acknowledged
            piece.wrong.update(writer.wrong)
        # Texts by uid; None for a deleted label.
        written_texts: dict[str, str | None] = {}
        for writer in writers:
            written_texts.update(writer.text)
        expected = {uid: text for uid, text in written_texts.items() if text}
        allowed = list(written_texts)
        response = clients[0].search([""], len(allowed), filter={"allow": allowed})
        remaining = response.results[0].answers
        found_texts = {answer.uid: answer.text for answer in remaining}
        piece.wrong["search disagrees"] += found_texts != expected
        piece.disturbances = len(killer.killed)
        unknown = sum(writer.unknown for writer in writers)
        piece.notes = f"{unknown} requests cut off, looked up afterwards; {len(remaining)} labels left at the end"
    finally:
        server.close()
    return piece


# ---- the log ----


def writers(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Ten kills of one log, then the next log."""
    acknowledged = 0
    with clock.working() as deadline:
        while piece.done < left and time.monotonic() < deadline:
            kills = min(10, left - piece.done)
            try:
                seed = left - piece.done
                acknowledged += kill_writers(folder / str(piece.done), kills, seed)
            except AssertionError as error:
                piece.wrong[str(error)[:200]] += 1
            piece.done += kills
    piece.disturbances = piece.done
    piece.notes = f"{acknowledged:,} operations were acknowledged"
    return piece


def damage(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Truncations, then flips, of the files that a kill leaves, and of those that an orderly end leaves."""
    draw = random.Random(left)
    outcomes = Counter[str]()

    def check(state: str, name: str, kind: str, files: dict[str, bytes], expected: Any) -> None:
        result = opened(folder / "c", files)
        if isinstance(result, str):
            outcomes["refused"] += 1
        elif result in expected:
            outcomes["read exactly"] += 1
        else:
            piece.wrong[f"{state} {name}: {kind}"] += 1

    states = {"killed": interrupted(folder / "a"), "closed": written(folder / "b")}
    damaged = [(state, name) for state, files in states.items() for name in files]
    truncations = []
    for state, name in damaged:
        truncations += [(state, name, stop) for stop in range(len(states[state][name]))]
    # Earlier calls did the first ones.
    num_done = sum(earlier.disturbances for earlier in pieces(piece.part))
    with clock.working() as deadline:
        for state, name, stop in truncations[num_done:]:
            if time.monotonic() >= deadline:
                break
            files = states[state]
            # A write-ahead log that ends earlier is that of an earlier moment.
            expected = COMMITS if name.endswith("-wal") else [ALL]
            shorter = {**files, name: files[name][:stop]}
            check(state, name, "truncation", shorter, expected)
            piece.disturbances += 1
        while piece.done < left and time.monotonic() < deadline:
            # The files take turns.
            state, name = damaged[piece.done % len(damaged)]
            files = states[state]
            bit = draw.randrange(8 * len(files[name]))
            check(state, name, "flip", flipped(files, name, bit), [ALL])
            piece.done += 1
    piece.notes = ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.items())
    return piece


# ---- bodies ----


def bodies(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Rounds of 300 that the description allows and 200 mutated ones."""
    bundle = write_bundle_of(folder / "bundle", "texts")
    state = folder / "state"
    config = ServeConfig(
        bundles={"a": str(bundle)}, mode="single", replicas=2, state_dir=str(state)
    )
    statuses = Counter[int]()
    memory_mib = list[float]()
    with serving(config, "127.0.0.1", free_port()) as url:
        replicas_before = all_replicas()
        headers = partial(token_of, state)
        rounds = [
            partial(ask_described, route=route, number=number) for route, number in ROUTES.items()
        ]
        rounds.append(partial(ask_mutated, number=ROUND - sum(ROUTES.values())))
        with clock.working() as deadline:
            while piece.done < left and time.monotonic() < deadline:
                for ask in rounds:
                    try:
                        counts = ask(url, headers, seed_=left - piece.done)
                    except AssertionError as error:
                        piece.wrong[str(error)[:200]] += 1
                        continue
                    statuses += counts
                    piece.done += counts.total()
                memory_mib.append(sum(map(resident_mib, all_replicas())))
        with client_of(url, state) as client:
            num_answers = len(client.search(["matrix"]).results[0].answers)
        piece.wrong["no answer afterwards"] += num_answers != 10
        piece.wrong["replica restarted"] += len(set(replicas_before) - set(all_replicas()))
    # The first round fills caches, so growth counts from the second one.
    settled_mib = memory_mib[1] if len(memory_mib) > 1 else memory_mib[0]
    piece.wrong["memory grew"] += memory_mib[-1] - settled_mib > 0.05 * memory_mib[0]
    by_round = ", ".join(f"{value:.0f}" for value in memory_mib)
    piece.notes = f"{counts_of(statuses)}; MiB of all replicas by round: {by_round}"
    return piece


def heads(piece: Piece, folder: Path, left: int, clock: Clock) -> Piece:
    """Rounds of 500 against a server that listens itself."""
    state = folder / "state"
    server = Server(write_bundle_of(folder / "bundle", "texts"), state)
    url = f"http://127.0.0.1:{server.port}"
    statuses = Counter[int]()
    try:
        before_mib = resident_mib(server.process.pid)
        with clock.working() as deadline:
            while piece.done < left and time.monotonic() < deadline:
                number = min(ROUND, left - piece.done)
                try:
                    statuses += ask_heads(url, partial(token_of, state), number, piece.done)
                except AssertionError as error:
                    piece.wrong[str(error)[:200]] += 1
                piece.done += number
        with client_of(url, state) as client:
            num_answers = len(client.search(["matrix"]).results[0].answers)
        piece.wrong["no answer afterwards"] += num_answers != 10
        after_mib = resident_mib(server.process.pid)
    finally:
        server.close()
    memory = f"{before_mib:.0f} MiB before, {after_mib:.0f} after"
    piece.notes = f"{counts_of(statuses)} (0: no answer); {memory}"
    return piece


def counts_of(statuses: Counter[int]) -> str:
    return ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))


def token_of(state: Path, path: str) -> dict[str, str]:
    """The header with the token that a path wants."""
    name = "admin-token" if path.startswith("/admin") else "token"
    return {"Authorization": f"Bearer {(state / name).read_text().strip()}"}


def all_replicas() -> list[int]:
    """Processes of all replicas."""
    return [*replicas("Gateway"), *replicas("Coordinator")]


def resident_mib(pid: int) -> float:
    """Resident memory of a process, without pages of files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            _, kib, _ = line.split()
            return int(kib) / 1024
    # An ended process.
    return 0.0


PARTS = {
    "kills": Part(kills, 20_000, "searches by clients with their own retries", "kills"),
    "swaps": Part(swaps, 20, "hot swaps under load", "swaps"),
    "labels": Part(labels, 2_000, "adds, updates and deletes of labels", "kills"),
    "writers": Part(writers, 50, "writers of a label log", "kills"),
    "damage": Part(damage, 600, "label logs with a flipped bit", "truncations"),
    "bodies": Part(bodies, 15_000, "random and mutated requests", "restarts"),
    "heads": Part(heads, 5_000, "requests with mutated heads", "restarts"),
}


if __name__ == "__main__":
    main()
