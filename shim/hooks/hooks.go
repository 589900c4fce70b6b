// Package hooks runs OCI hooks on the host.
package hooks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// DefaultTimeout bounds a hook that has no timeout of its own.
const DefaultTimeout = 10 * time.Second

// maxOutput is how much of a failed hook's output its error quotes.
const maxOutput = 512

// Run runs the hooks of one point in the container's life, one after the other, in its bundle, with the container's state
// on stdin.
// The first that fails ends it.
func Run(ctx context.Context, point string, hooks []specs.Hook, state specs.State) error {
	if len(hooks) == 0 {
		return nil
	}
	state.Version = specs.Version
	in, err := json.Marshal(state)
	if err != nil {
		return err
	}
	for _, h := range hooks {
		if err := run(ctx, h, state.Bundle, in); err != nil {
			return fmt.Errorf("%s hook %s: %w", point, h.Path, err)
		}
	}
	return nil
}

func run(ctx context.Context, h specs.Hook, dir string, state []byte) error {
	limit := DefaultTimeout
	if h.Timeout != nil && *h.Timeout > 0 {
		limit = time.Duration(*h.Timeout) * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.Path)
	cmd.Dir = dir
	if len(h.Args) > 0 {
		cmd.Args = h.Args
	}
	cmd.Env = h.Env
	if cmd.Env == nil {
		cmd.Env = []string{} // nothing of the shim's own
	}
	cmd.Stdin = bytes.NewReader(state)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second // a child that keeps the pipe open doesn't keep us
	err := cmd.Run()
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("not finished in %s: %w", limit, ctx.Err())
	}
	if text := strings.TrimSpace(out.String()); text != "" {
		err = fmt.Errorf("%w: %s", err, text[max(0, len(text)-maxOutput):])
	}
	return err
}
