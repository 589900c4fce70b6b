package machines

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/shim/record"
)

// emulator is what the processes of machines are called, as far as the kernel keeps a name.
const emulator = "qemu-system-x86"

// Use tells what running machines take of the host. It reads a few lines of /proc for each, and asks nobody.
func (m *Machines) Use(ctx context.Context) (map[string]lifecycle.HostUse, error) {
	pods, err := record.Pods(m.cfg.PodDir())
	if err != nil {
		return nil, err
	}
	all := map[string]lifecycle.HostUse{}
	var errs []error
	for _, p := range pods {
		if ctx.Err() != nil {
			return all, errors.Join(append(errs, ctx.Err())...)
		}
		state, err := p.State()
		if errors.Is(err, fs.ErrNotExist) || err == nil && (state.PID == 0 || state.Namespace != m.cfg.Containerd.Namespace) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		use, err := process.UseOf(state.PID)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH): // it has ended
		case err != nil:
			errs = append(errs, err)
		case use.Command == emulator: // else it has ended, and its pid is another's
			all[state.ID] = lifecycle.HostUse{CPU: use.CPU, Memory: use.Resident}
		}
	}
	return all, errors.Join(errs...)
}
