package stack

import (
	"log/slog"
	"net"
	"os"
	"strings"
)

// notifyEnv names the socket by which a service manager is told how a service of Type=notify does; see sd_notify(3).
const notifyEnv = "NOTIFY_SOCKET"

// notifier tells the service manager, if there is one.
type notifier struct {
	socket string
	log    *slog.Logger
}

// takeNotifier takes the socket from the environment, so that no daemon of the stack's speaks for it: containerd would.
func takeNotifier(log *slog.Logger) (notifier, error) {
	n := notifier{socket: os.Getenv(notifyEnv), log: log}
	return n, os.Unsetenv(notifyEnv)
}

// tell sends assignments such as READY=1. A manager that can't be told is no failure of the stack's.
func (n notifier) tell(assignments ...string) {
	if n.socket == "" {
		return
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err == nil {
		_, err = c.Write([]byte(strings.Join(assignments, "\n")))
		_ = c.Close()
	}
	if err != nil {
		n.log.Warn("the service manager can't be told", "socket", n.socket, "error", err)
	}
}
