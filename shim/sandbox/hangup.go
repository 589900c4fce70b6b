package sandbox

import (
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// hangupLimit is how long a client that has its answer may take to hang up. containerd does it at once.
const hangupLimit = 200 * time.Millisecond

// awaitHangup waits until nobody is connected to the socket any more. ttrpc doesn't tell when an answer has been written,
// and a client whose answer gets lost takes the call for failed; one that hangs up has it, or doesn't want it.
func awaitHangup(socket string, limit time.Duration) {
	clients := connected(socket)
	for end := time.Now().Add(limit); len(clients) > 0; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		if _, err := unix.Poll(clients, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		var there []unix.PollFd
		for _, c := range clients {
			if c.Revents == 0 {
				there = append(there, c)
			}
		}
		clients = there
	}
}

// connected lists the connections that this process has accepted on the socket.
func connected(socket string) (list []unix.PollFd) {
	entries, _ := os.ReadDir("/proc/self/fd") // without it there is nothing to wait for
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		addr, err := unix.Getsockname(fd)
		if u, ok := addr.(*unix.SockaddrUnix); err != nil || !ok || u.Name != socket {
			continue
		}
		if _, err := unix.Getpeername(fd); err == nil { // else it is the listener
			list = append(list, unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP})
		}
	}
	return list
}
