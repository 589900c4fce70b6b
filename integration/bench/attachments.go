package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
)

// measured is an operation on one container or pod after the other.
type measured struct {
	name string
	call func(i int) error
}

// attachments measures what pods' places in the network cost: what the shim and the plugin call, and the plugin as runtimes
// call it.
func (b *networkBench) attachments(ctx context.Context) error {
	fmt.Printf("\n### A place in the network\n\n| | p50 ms | p95 ms |\n| --- | --- | --- |\n")
	return b.path.host.Do(func() error {
		if err := b.calls(ctx); err != nil {
			return err
		}
		return b.plugin(ctx)
	})
}

// calls begins without a tap that is ready, and ends with n of them.
func (b *networkBench) calls(ctx context.Context) error {
	pod := func(i int) network.Pod { return network.Pod{Namespace: "bench", ID: fmt.Sprint(i)} }
	open := func(i int) error {
		_, err := b.open(ctx, fmt.Sprint("bench-", i))
		return err
	}
	closing := func(i int) error { return b.Close(ctx, fmt.Sprint("bench-", i), "bench", "eth0") }
	err := b.rows(ctx, []measured{
		{"`Open`, a tap is made", open},
		{"`Claim` of what is open", func(i int) error { _, err := b.Claim(ctx, pod(i)); return err }},
		{"`OpenTap`", func(i int) error {
			f, err := b.OpenTap(ctx, pod(i))
			if err != nil {
				return err
			}
			return f.Close()
		}},
		{"`Close`", closing},
		{"`Release`, the machine's tap is removed", func(i int) error { return b.Release(ctx, pod(i)) }},
	})
	if err != nil {
		return err
	}
	began := time.Now()
	made, err := b.Refill(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("| a tap is made ready (mean) | %.2f | |\n", ms(time.Since(began))/float64(max(made, 1)))
	return b.rows(ctx, []measured{
		{"`Open`, a tap is ready", open},
		{"`Close`, the tap is ready again", closing},
	})
}

func (b *networkBench) open(ctx context.Context, id string) (*network.Attachment, error) {
	return b.Open(ctx, network.Request{ID: id, Network: "bench", IfName: "eth0", Policy: &policy.Policy{Default: policy.Direct}})
}

// plugin begins with n taps that are ready.
func (b *networkBench) plugin(ctx context.Context) error {
	conf := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "bench", "type": "cube-cni", "cubeConfig": %q, "policy": {"default": "allow"}}`, b.file)
	verb := func(command string, from int) func(int) error {
		return func(i int) error {
			cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "cube-cni"))
			cmd.Stdin = strings.NewReader(conf)
			cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, fmt.Sprint("CNI_CONTAINERID=bench-", from+i), "CNI_IFNAME=eth0",
				"CNI_NETNS="+b.path.client.Path(), "CNI_PATH="+b.bin)
			if out, err := cmd.Output(); err != nil {
				return fmt.Errorf("cube-cni %s: %w: %s", command, err, out)
			}
			return nil
		}
	}
	return b.rows(ctx, []measured{
		{"`cube-cni` VERSION, which is its start", verb("VERSION", 0)},
		{"`cube-cni` ADD, a tap is ready", verb("ADD", 0)},
		{"`cube-cni` ADD, a tap is made", verb("ADD", b.n)},
		{"`cube-cni` DEL", verb("DEL", 0)},
	})
}

// rows measures operations, each n times before the next.
func (b *networkBench) rows(ctx context.Context, all []measured) error {
	for _, m := range all {
		s, err := b.sample(ctx, m.call)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		fmt.Println(s.fineRow(m.name))
	}
	return nil
}

func (b *networkBench) sample(ctx context.Context, call func(i int) error) (sample, error) {
	var s sample
	for i := range b.n {
		began := time.Now()
		if err := errors.Join(call(i), ctx.Err()); err != nil {
			return nil, err
		}
		s = append(s, time.Since(began))
	}
	return s, nil
}
