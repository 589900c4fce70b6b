"""Calls of E2B's SDK for Python as published, against a stack with the template base. Prints a line for each test: "ok NAME" or
"not ok NAME", and after a tab how long it took, or why.
    python3 suite.py sync|async
Environment: as of main.mjs."""

import asyncio
import inspect
import os
import sys
import time

import e2b
import httpx

SYNC = sys.argv[1] == "sync"
Sandbox = e2b.Sandbox if SYNC else e2b.AsyncSandbox
LONG = float(os.environ.get("CUBE_TIMEOUT_SCALE", "1")) * 60
failed = []


async def of(result):
    """What a call returns: the SDKs differ in whether it has to be awaited."""
    return await result if inspect.isawaitable(result) else result


async def rejects(error, call, *words):
    """An error of a class, whose message has all of the words."""
    try:
        await of(call())
    except error as e:
        assert all(w in str(e) for w in words), e
        return e
    raise AssertionError(f"there is no {error.__name__}")


async def until(what, ready):
    deadline = time.monotonic() + LONG
    while not await ready():
        assert time.monotonic() < deadline, f"{what} has not come"
        await asyncio.sleep(0.1)


async def drain(paginator):
    items = []
    while paginator.has_next:
        items += await of(paginator.next_items())
    return items


async def test(name, run, *args):
    started = time.monotonic()
    try:
        result = await run(*args)
        print(f"ok {name}\t{(time.monotonic() - started) * 1000:.0f} ms", flush=True)
        return result
    except Exception as e:
        failed.append(name)
        print(f"not ok {name}\t{e!r} at line {e.__traceback__.tb_next and e.__traceback__.tb_next.tb_lineno}", flush=True)


async def create():
    sandbox = await of(Sandbox.create(
        metadata={"k 1": "v&2"}, envs={"FROM_CREATE": "a b"}, timeout=1800,
        network={"deny_out": lambda ctx: ["10.0.0.0/8"], "allow_public_traffic": False},
        lifecycle={"on_timeout": "pause", "auto_resume": True},
    ))
    info = await of(sandbox.get_info())
    assert info.sandbox_id == sandbox.sandbox_id and info.state == e2b.SandboxState.RUNNING, info
    assert info.metadata == {"k 1": "v&2"} and info.name == "base" and info.cpu_count == 2, info
    assert round((info.end_at - info.started_at).total_seconds()) == 1800, info
    assert sandbox.traffic_access_token
    listed = await drain(Sandbox.list(query=e2b.SandboxQuery(metadata={"k 1": "v&2"}, state=[e2b.SandboxState.RUNNING])))
    assert [s.sandbox_id for s in listed] == [sandbox.sandbox_id]
    assert await drain(Sandbox.list(query=e2b.SandboxQuery(metadata={"k 1": "other"}))) == []
    return sandbox


async def run(sandbox):
    out, err = [], []
    r = await of(sandbox.commands.run('echo "$FROM_CREATE"; echo bad >&2', on_stdout=out.append, on_stderr=err.append))
    assert (r.stdout, r.stderr, r.exit_code) == ("a b\n", "bad\n", 0) and "".join(out) == r.stdout and "".join(err) == r.stderr, r
    r = await of(sandbox.commands.run('echo "$(id -un) $PWD $A"', user="root", cwd="/var/tmp", envs={"A": "b"}))
    assert r.stdout == "root /var/tmp b\n", r
    e = await rejects(e2b.CommandExitException, lambda: sandbox.commands.run("echo why >&2; exit 3"))
    assert (e.exit_code, e.stderr) == (3, "why\n"), e
    await rejects(e2b.TimeoutException, lambda: sandbox.commands.run("sleep 4321", timeout=1))
    await rejects(e2b.InvalidArgumentException, lambda: sandbox.commands.run("true", cwd="/nowhere"))


async def processes(sandbox):
    h = await of(sandbox.commands.run("cat; echo end", background=True, stdin=True, timeout=0))
    assert [(p.cmd, p.args) for p in await of(sandbox.commands.list()) if p.pid == h.pid] == [("/bin/bash", ["-l", "-c", "cat; echo end"])]
    await of(sandbox.commands.send_stdin(h.pid, "a\n"))
    await of(sandbox.commands.close_stdin(h.pid))
    assert (await of(h.wait())).stdout == "a\nend\n"
    h = await of(sandbox.commands.run("sleep 1000", background=True, timeout=0))
    await of(h.disconnect())
    again = await of(sandbox.commands.connect(h.pid))
    assert await of(again.kill()) is True
    await rejects(e2b.CommandExitException, again.wait)
    assert await of(sandbox.commands.kill(h.pid)) is False


async def terminal(sandbox):
    out = []
    # Who is told of the output is said at once, or while it is waited for.
    h = await of(sandbox.pty.create(e2b.PtySize(rows=24, cols=80), **({} if SYNC else {"on_data": out.append})))
    await of(sandbox.pty.resize(h.pid, e2b.PtySize(rows=50, cols=132)))
    await of(sandbox.pty.send_stdin(h.pid, b"stty size; exit 7\n"))
    e = await rejects(e2b.CommandExitException, lambda: h.wait(**({"on_pty": out.append} if SYNC else {})))
    assert e.exit_code == 7 and b"50 132" in b"".join(out), (e, out)
    h = await of(sandbox.pty.create(e2b.PtySize(rows=24, cols=80), **({} if SYNC else {"on_data": out.append})))
    assert await of(sandbox.pty.kill(h.pid)) is True


async def files(sandbox):
    f = sandbox.files
    data = bytes(i * i >> 3 & 255 for i in range(300_000))
    w = await of(f.write("dir/a.txt", "text", metadata={"author": "me"}))
    assert (w.name, w.path, w.metadata) == ("a.txt", "/home/user/dir/a.txt", {"author": "me"}), w
    await of(f.write_files([{"path": "/tmp/bytes", "data": data}, {"path": "packed", "data": b"x" * 100_000}], gzip=True))
    assert await of(f.read("dir/a.txt")) == "text"
    assert bytes(await of(f.read("/tmp/bytes", format="bytes"))) == data
    got = await of(f.read("packed", format="stream", gzip=True))
    assert b"".join(got if SYNC else [piece async for piece in got]) == b"x" * 100_000
    assert [await of(f.make_dir("dir/sub")) for _ in range(2)] == [True, False]
    assert sorted((e.name, e.type) for e in await of(f.list("dir"))) == [("a.txt", e2b.FileType.FILE), ("sub", e2b.FileType.DIR)]
    info = await of(f.get_info("dir/a.txt"))
    assert (info.size, info.permissions, info.owner) == (4, "-rw-r--r--", "user"), info
    assert (await of(f.rename("dir/a.txt", "dir/b.txt"))).path == "/home/user/dir/b.txt"
    await of(f.remove("dir/sub"))
    assert [await of(f.exists(p)) for p in ("dir/b.txt", "dir/sub")] == [True, False]
    await rejects(e2b.FileNotFoundException, lambda: f.read("missing"))
    await rejects(e2b.InvalidArgumentException, lambda: f.read("/tmp"))


async def watch(sandbox):
    await of(sandbox.files.make_dir("watched/a"))
    seen = []
    w = await of(sandbox.files.watch_dir("watched", **({} if SYNC else {"on_event": seen.append}), recursive=True))
    await of(sandbox.files.write("watched/a/new", "x"))

    async def told():
        if SYNC:
            seen.extend(w.get_new_events())
        return any(e.name == "a/new" and e.type == e2b.FilesystemEventType.WRITE for e in seen)

    await until("the event", told)
    await of(w.stop())


async def urls(sandbox):
    by_domain = "E2B_SANDBOX_URL" not in os.environ
    # By headers, who uses a signed URL has to say which sandbox it is of.
    headers = {} if by_domain else {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    tls = {"verify": os.environ["SSL_CERT_FILE"]} if by_domain else {}
    with httpx.Client(headers=headers, timeout=LONG, **tls) as client:
        r = client.post(sandbox.upload_url("signed.txt", use_signature_expiration=600), files={"file": b"signed"})
        assert r.status_code == 200, r.text
        r = client.get(sandbox.download_url("signed.txt", use_signature_expiration=600))
        assert r.text == "signed", r.text
        r = client.get(sandbox.download_url("signed.txt", use_signature_expiration=-10))
        assert (r.status_code, r.json()["message"]) == (401, "signature is already expired")


async def network(sandbox):
    line = f"timeout 5 bash -c 'exec 3<>/dev/tcp/{os.environ['SERVER']}/7000; echo hi >&3; head -n 1 <&3' 2>/dev/null || true"
    assert (await of(sandbox.commands.run(line))).stdout == "hi\n"
    await of(sandbox.update_network({"deny_out": [os.environ["SERVER"]]}))
    assert (await of(sandbox.commands.run(line))).stdout == ""
    await of(sandbox.update_network({}))


async def lifecycle(sandbox):
    await of(sandbox.commands.run("echo kept > /dev/shm/word"))
    assert await of(sandbox.pause()) and not await of(sandbox.pause())
    assert (await of(sandbox.get_info())).state == e2b.SandboxState.PAUSED
    same = await of(Sandbox.connect(sandbox.sandbox_id, timeout=1800))
    assert (await of(same.commands.run("cat /dev/shm/word"))).stdout == "kept\n"
    await of(same.set_timeout(900))
    assert await of(same.is_running())
    metrics = (await of(same.get_metrics()))[-1]
    assert metrics.cpu_count == 2 and 0 < metrics.mem_used < metrics.mem_total, metrics
    snapshot = await of(same.create_snapshot())
    assert [s.snapshot_id for s in await drain(same.list_snapshots())] == [snapshot.snapshot_id]
    child = await of(Sandbox.create(snapshot.snapshot_id, timeout=600))
    assert (await of(child.commands.run("cat /dev/shm/word"))).stdout == "kept\n"
    await of(child.kill())
    assert [await of(Sandbox.delete_snapshot(snapshot.snapshot_id)) for _ in range(2)] == [True, False]
    (fork,) = await of(same.fork(timeout=600))
    assert (await of(fork.commands.run("cat /dev/shm/word; echo $E2B_SANDBOX_ID"))).stdout == f"kept\n{fork.sandbox_id}\n"
    await of(fork.kill())


async def errors(sandbox):
    id = sandbox.sandbox_id
    await rejects(e2b.AuthenticationException, lambda: Sandbox.create(api_key="e2b_" + "0" * 40), "cube key create")
    other = {"api_key": os.environ["OTHER_KEY"]}
    await rejects(e2b.SandboxNotFoundException, lambda: Sandbox.get_info(id, **other))
    assert await of(Sandbox.kill(id, **other)) is False
    await rejects(e2b.SandboxException, lambda: Sandbox.create(network={"allow_out": ["a.test"], "deny_out": ["0.0.0.0/0"]}), "400", "network.allowOut[0]")
    await rejects(e2b.SandboxException, lambda: Sandbox.create("no-such-template"), "no-such-template")


async def kill(sandbox):
    assert await of(sandbox.kill()) is True
    assert await of(sandbox.is_running()) is False
    assert await of(Sandbox.kill(sandbox.sandbox_id)) is False
    await rejects(e2b.SandboxNotFoundException, sandbox.get_info)


async def main():
    sandbox = await test("create, what is told of it, lists", create)
    if sandbox is not None:
        # What the machine does takes longest, and is the same for both.
        machine = (network, lifecycle) if SYNC or os.environ.get("CUBE_TEST_LONG") else ()
        for t in (run, processes, terminal, files, watch, urls, *machine, errors, kill):
            await test(t.__name__, t, sandbox)


asyncio.run(main())
sys.stdout.flush()
# Without the interpreter's own end: the SDK's HTTP library has native threads, which at times have that abort.
os._exit(1 if failed else 0)
