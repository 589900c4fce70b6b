package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/agent/modules"
)

// answerTimeout bounds the wait for a host that has the answer to Shutdown to end the session.
const answerTimeout = time.Second

// forShares are the modules that a container with files of the host needs. The kernel would load them when the first one
// comes, which takes an emulated machine a second.
var forShares = []string{"9p", "9pnet_fd"}

// Quiesce makes the machine's memory fit to be the beginning of many others.
func (s *service) Quiesce(ctx context.Context, _ *emptypb.Empty) (*emptypb.Empty, error) {
	if n := len(s.Containers.All()); n > 0 {
		return nil, fmt.Errorf("%d containers exist: %w", n, errdefs.ErrFailedPrecondition)
	}
	if err := modules.Load(ctx, forShares...); err != nil {
		return nil, err
	}
	if err := errors.Join(s.Tools.Unmount(), modules.Unmount(), rehearse()); err != nil {
		return nil, err
	}
	debug.FreeOSMemory()
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		return nil, fmt.Errorf("drop caches: %w", err)
	}
	if err := zeroFree(ctx); err != nil {
		return nil, err
	}
	// Whoever uses the memory must configure the guest first.
	s.configured.Store(false)
	return empty, nil
}

func (s *service) Shutdown(ctx context.Context, _ *emptypb.Empty) (*emptypb.Empty, error) {
	err := errors.Join(s.Containers.Leave(ctx), s.Tools.Unmount(), modules.Unmount())
	unix.Sync()
	if err != nil {
		return nil, err
	}
	go func() {
		select {
		case <-s.session.Done():
		case <-time.After(answerTimeout):
		}
		s.PowerOff()
	}()
	return empty, nil
}
