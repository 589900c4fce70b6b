package manager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
)

const (
	// answerLimit is how long a server that lives may take for an answer that it has in memory.
	answerLimit = time.Second
	// askLimit bounds the end of a container by its server.
	askLimit = 2500 * time.Millisecond
)

// askShim has the server end and delete the container, if that has anything left. It tells whether the server lives. One
// that does, but can't end the container in time, has been told to, and keeps it for itself and the pod's end.
func (s *stop) askShim(ctx context.Context) (lives bool) {
	state, err := s.bundle.State()
	if errors.Is(err, fs.ErrNotExist) || err == nil && state.Undone {
		return true // or not, which is for the others to find out
	}
	address, err := s.pod.Address()
	if err != nil {
		return false
	}
	conn, err := shim.AnonDialer(address, answerLimit)
	if err != nil {
		return false
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	task := taskapi.NewTTRPCTaskClient(client)

	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	short, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	if _, err := task.Connect(short, &taskapi.ConnectRequest{ID: s.id}); err != nil {
		return false
	}
	if err := end(ctx, task, s.id); err != nil {
		warn(fmt.Errorf("have the pod's shim end the container: %w", err))
	}
	return true
}

// end kills and deletes a container; one that isn't there is fine.
func end(ctx context.Context, task taskapi.TTRPCTaskService, id string) error {
	_, err := task.Kill(ctx, &taskapi.KillRequest{ID: id, Signal: uint32(unix.SIGKILL), All: true})
	if err := errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if _, err = task.Wait(ctx, &taskapi.WaitRequest{ID: id}); err == nil {
		_, err = task.Delete(ctx, &taskapi.DeleteRequest{ID: id})
	}
	if err := errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}
