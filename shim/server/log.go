package server

import (
	"log/slog"
	"os"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// logRoom is what the log's fifo holds: a dump of all stacks, which SIGUSR1 asks for, fits.
const logRoom = 1 << 20

// openLog returns the shim's log, which pkg/shim's lines go to, too: f, containerd's log fifo. A containerd that is
// stopped leaves it full and one that is gone leaves it without a reader. Then lines are lost, and nobody waits; the next
// containerd reads on.
func openLog(f *os.File) *slog.Logger {
	unix.FcntlInt(f.Fd(), unix.F_SETPIPE_SZ, logRoom) // it works with less
	if err := unix.SetNonblock(int(f.Fd()), true); err != nil {
		log.L.WithError(err).Warn("a containerd that reads no logs will hold up this shim")
	}
	w := lossy{f}
	log.L.Logger.SetOutput(w)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level()})).With("runtime", "io.cube.v2")
}

// lossy drops what can't be written.
type lossy struct{ f *os.File }

func (l lossy) Write(p []byte) (int, error) {
	l.f.Write(p) // there is nobody to tell
	return len(p), nil
}

// level is that of pkg/shim's logger, which has read the flags.
func level() slog.Level {
	if log.GetLevel() >= log.DebugLevel {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}
