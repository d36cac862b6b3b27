"""Workers that talk to each other and fail when one of them ends, like those of a real job but without torch.

They form a star: each rank is connected to rank 0.  A worker whose peer ends without a farewell fails 20 to 50 ms later,
as with gloo or NCCL; a worker whose peer is silent waits.  Call `begin_talk()` once, after `say` and `rank` of the
launcher's preamble.

Environment variables configure it: `STAR` is the folder where rank 0 writes its port, and `STAR_PORT` fixes that port.
With `STAR_TICK_S` the star steps once per tick, all ranks or none; each worker then writes a line `time fence world step`
to the file `progress` in its agent's folder.  With `STAR_SOLO` the ranks step alone; with `STAR_GLOO` a step is a barrier
of torch's gloo, and a worker dies of its exception.  With `STAR_SAVES` the ranks ask after each step whether to save
(`aelastic.notice`), and do so together; with `STAR_SAVES=exit` they end then.
"""

STAR = """
import errno, random, select, socket, threading, traceback

is_connected = threading.Event()
talks = []  # not empty: the talk has begun
peers = []  # of rank 0: every other rank's connection; of another rank: the one to rank 0


def begin_talk():
    # Once, also if a signal's handler, which says farewell, runs in the middle of this.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not talks:
        talks.append(True)
        tick_s = float(os.environ.get("STAR_TICK_S", "0"))
        if not tick_s and int(os.environ["WORLD_SIZE"]) == 1:
            is_connected.set()
        else:
            threading.Thread(target=talk, args=[tick_s], daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def talk(tick_s):
    step_together, saves = exchange, os.environ.get("STAR_SAVES")
    if saves:
        from aelastic import notice
    try:
        if os.environ.get("STAR_GLOO"):
            import torch.distributed as dist

            dist.init_process_group("gloo")
            step_together = dist.barrier
        elif not os.environ.get("STAR_SOLO"):
            peers.extend(hub() if rank == 0 else [spoke()])
        is_connected.set()
        step = 0
        while True:
            if tick_s:
                step += 1
                step_together()
                line = f"{time.monotonic():.3f} {os.environ['AELASTIC_ROUND']} {os.environ['WORLD_SIZE']} {step}\\n"
                with open("progress", "a") as file:
                    file.write(line)
                if saves and notice.due():
                    step_together()  # a save is of all ranks
                    say("saved", os.environ["AELASTIC_ROUND"], rank, step)
                    if saves == "exit":
                        os._exit(0)
                    notice.saved()
                    say("goes on", rank, step)
                time.sleep(tick_s)
            elif peers:
                hear(select.select(peers, [], [])[0][0])
            else:
                return
    except Exception:
        time.sleep(random.uniform(0.02, 0.05))
        traceback.print_exc()
        os._exit(1)


def exchange():
    if rank == 0:
        for peer in list(peers):
            hear(peer)
    for peer in list(peers):
        peer.sendall(b".")
    if rank:
        for peer in list(peers):
            hear(peer)


def hear(peer):
    what = peer.recv(1)
    if what == b"!":
        peers.remove(peer)
    elif not what:
        raise RuntimeError(f"rank {rank}: connection closed by peer")


def hub():
    family = socket.AF_INET6 if ":" in os.environ["MASTER_ADDR"] else socket.AF_INET
    with socket.create_server(("", int(os.environ.get("STAR_PORT", "0"))), family=family) as server:
        with open(meeting_file() + ".new", "w") as file:
            file.write(str(server.getsockname()[1]))
        os.rename(meeting_file() + ".new", meeting_file())
        found = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    return [at_once(peer) for peer in found]


def spoke():
    wait_for(meeting_file())
    while True:
        try:
            return at_once(socket.create_connection((os.environ["MASTER_ADDR"], int(open(meeting_file()).read())), 20.0))
        except OSError as error:
            if error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                raise
        time.sleep(0.05)  # this node is cut off: a silent peer


def at_once(peer):
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def meeting_file():
    parts = [os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "AELASTIC_ROUND", "MASTER_PORT", "WORLD_SIZE")]
    return os.path.join(os.environ["STAR"], "-".join(parts))


def say_farewell():
    begin_talk()  # told to end before it came to that
    is_connected.wait(20.0)
    for peer in list(peers):
        try:
            peer.sendall(b"!")
        except OSError:
            pass  # it has gone first
"""
