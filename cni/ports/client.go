package ports

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/cubesandbox/cube/internal/control"
)

// Path is where a Server answers, on the daemon's control socket.
const Path = "/network/ports"

// UpdateTimeout is what an Update should take at most, on a host that isn't slow.
const UpdateTimeout = 10 * time.Second

// State is how things stand with a port.
type State struct {
	Port
	ID     string `json:"id"`               // the sandbox's
	Reason string `json:"reason,omitempty"` // why it isn't served; "": it is
}

// Update has the daemon behind a control socket look at a sandbox's ports again. When it returns, all that the sandbox has are
// served, and what it had before reaches it no more. errdefs.ErrConflict for a port that another process has,
// errdefs.ErrInvalidArgument for an address that the host hasn't, errdefs.ErrUnavailable if no daemon answers.
func Update(ctx context.Context, socket, id string) error {
	if err := control.Ask(ctx, socket, http.MethodPost, Path, url.Values{"id": {id}}, nil); err != nil {
		return fmt.Errorf("map ports of the host: %w", err)
	}
	return nil
}

// List asks the daemon for the ports of a sandbox, "" for those of all. The errors are Update's.
func List(ctx context.Context, socket, id string) (all []State, err error) {
	if err := control.Ask(ctx, socket, http.MethodGet, Path, url.Values{"id": {id}}, &all); err != nil {
		return nil, fmt.Errorf("list port mappings: %w", err)
	}
	return all, nil
}
