package network

import (
	"context"

	"github.com/cubesandbox/cube/bpf"
)

// Sandbox is what the datapath knows what is open under a CNI id by, and its epoch there; errdefs.ErrNotFound if it isn't
// open.
func (n *Network) Sandbox(ctx context.Context, id string) (sandbox bpf.ID, epoch uint32, err error) {
	err = n.look(ctx, id, func(s *session, a *attachment) (err error) {
		sandbox = bpf.ID(a.Tap)
		epoch, err = s.datapath.Epoch(sandbox)
		return err
	})
	return sandbox, epoch, err
}
