"""See README.md. Called with the directory that steers it, then with the arguments of `nvidia-cuda-mps-control`."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

GB = 1024


def steered(word):
    try:
        return word in (HERE / "mps-steer").read_text().split()
    except OSError:
        return False


def call_me(name):
    ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)


class Refused(Exception):
    pass


class Daemon:
    def __init__(self, pipe):
        self.pipe = pipe
        self.lock = threading.Lock()
        self.servers = {}  # pid: process
        self.user_of = {}  # server: uid
        self.clients = {}  # client: (server, connection)
        self.percent = {None: 100.0}  # by server; None: of those to come
        self.memory = {None: {}}  # by server and device, as text
        self.over = threading.Event()

    def serve(self):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.pipe / "control"))
        (self.pipe / "control").chmod(0o666)
        listener.listen()
        (self.pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
        threading.Thread(target=self.look_after, daemon=True).start()
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        self.over.wait()
        with self.lock:
            for process in self.servers.values():
                process.kill()
                process.wait()
        for path in self.pipe.iterdir():
            path.unlink()
        os._exit(0)

    def accept(self, listener):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def look_after(self):
        """A server that is gone takes its clients with it."""
        while not self.over.wait(0.02):
            with self.lock:
                for pid in [pid for pid, process in self.servers.items() if process.poll() is not None]:
                    self.forget(pid)

    def forget(self, server):
        self.servers.pop(server)
        self.user_of.pop(server)
        for client in [client for client, (of, _) in self.clients.items() if of == server]:
            self.clients.pop(client)[1].shutdown(socket.SHUT_RDWR)

    def talk(self, connection):
        try:
            words = connection.makefile().readline().split()
            if words[:1] == ["client"]:
                self.admit(connection, int(words[1]), int(words[2]))
                return
            with (HERE / "mps-commands").open("a") as file:
                file.write(" ".join(words) + "\n")
            while steered("mute") and words[:1] != ["quit"]:
                time.sleep(0.05)
            try:
                with self.lock:
                    answer = "0 " + self.do(words)
            except (Refused, ValueError, IndexError, KeyError) as error:
                answer = f"1 {error or 'wrong command'}"
            connection.sendall(answer.encode())
            connection.close()
            if words[:1] == ["quit"]:
                self.over.set()
        except OSError:
            connection.close()

    # --- clients

    def admit(self, connection, client, uid):
        if steered("fault"):
            connection.sendall(b"fault\n")
            connection.close()
            return
        while True:
            with self.lock:
                server = next((pid for pid, user in self.user_of.items() if user == uid), None)
                if server is None and not self.clients:
                    for pid, process in list(self.servers.items()):
                        process.kill()
                        process.wait()
                        self.forget(pid)
                    server = self.start(uid)
                if server is not None:
                    self.clients[client] = (server, connection)
                    break
            time.sleep(0.02)
        connection.sendall(b"ok\n")
        connection.recv(1)  # Until it leaves, or is cut off.
        with self.lock:
            if client in self.clients and self.clients[client][1] is connection:
                self.clients.pop(client)
        connection.close()

    def start(self, uid):
        argv = [sys.executable, "-I", "-S", __file__, str(HERE), "server"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        while not Path(f"/proc/{process.pid}/comm").read_text().startswith("nvidia"):
            time.sleep(0.005)
        self.servers[process.pid], self.user_of[process.pid] = process, uid
        self.percent[process.pid], self.memory[process.pid] = self.percent[None], dict(self.memory[None])
        return process.pid

    # --- commands

    def do(self, words):
        name, rest = words[0], words[1:]
        if name == "get_server_list" and not rest:
            return "".join(f"{pid}\n" for pid in self.servers)
        if name == "get_client_list" and len(rest) == 1:
            server = self.server(rest[0])
            return "".join(f"{client}\n" for client, (of, _) in self.clients.items() if of == server)
        if name == "start_server" and len(rest) == 2 and rest[0] == "-uid":
            return f"{self.start(int(rest[1]))}\n"
        if name == "terminate_client" and len(rest) == 2:
            server, client = self.server(rest[0]), int(rest[1])
            if self.clients[client][0] != server:
                raise Refused("no such client")
            self.clients.pop(client)[1].shutdown(socket.SHUT_RDWR)
            return ""
        if name == "quit" and (not rest or (len(rest) == 2 and rest[0] == "-t" and int(rest[1]) >= 0)):
            return ""
        if name.endswith("active_thread_percentage"):
            return self.threads(name, rest)
        if name.endswith("device_pinned_mem_limit"):
            return self.pinned(name, rest)
        raise Refused("unknown command")

    def server(self, word):
        pid = int(word)
        if pid not in self.servers:
            raise Refused("no such server")
        return pid

    def threads(self, name, rest):
        of = None if "default" in name else self.server(rest.pop(0))
        if name.startswith("get_") and not rest:
            return f"{self.percent[of]}\n"
        if name.startswith("set_") and len(rest) == 1 and 0 <= float(rest[0]) <= 100:
            if not steered("deaf"):
                self.percent[of] = float(rest[0])
            return f"{self.percent[of]}\n"
        raise Refused("wrong arguments")

    def pinned(self, name, rest):
        of = None if "default" in name else self.server(rest.pop(0))
        device = rest.pop(0)
        if device != "0":
            raise Refused("no such device")  # Such as a UUID.
        if name.startswith("get_") and not rest:
            return f"{self.memory[of].get(device, '0M')}\n"
        if name.startswith("set_") and len(rest) == 1 and rest[0][-1] in "GM" and int(rest[0][:-1]) >= 0:
            if not steered("deaf"):
                mib = int(rest[0][:-1]) * (GB if rest[0][-1] == "G" else 1)
                self.memory[of][device] = f"{mib}M"
            return ""
        raise Refused("wrong arguments")


def control(pipe):
    code = 0
    for line in sys.stdin:
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(pipe / "control"))
        except OSError:
            print("Cannot find MPS control daemon process")
            return 1
        connection.sendall(line.encode())
        status, _, text = connection.makefile().read().partition(" ")
        sys.stdout.write(text)
        code = code or int(status or 1)
    return code


def main(arguments):
    if arguments == ["server"]:
        call_me("nvidia-cuda-mps-server")
        signal.pause()
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if not arguments:
        return control(pipe)
    if arguments != ["-d"]:
        print(f"unknown arguments: {arguments}")
        return 1
    if not pipe.is_dir() or not Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir():
        print("the directories are not there")
        return 1
    if steered("refuse") or (pipe / "control").exists():
        print("An instance of this daemon is already running" if not steered("refuse") else "Failed to start the daemon")
        return 1
    if os.fork():
        while not (pipe / "nvidia-cuda-mps-control.pid").exists():
            time.sleep(0.005)
        return 0
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    call_me("nvidia-cuda-mps-control")
    Daemon(pipe).serve()
    return 0


if __name__ == "__main__":
    HERE = Path(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
