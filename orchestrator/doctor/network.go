package doctor

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/containerd/errdefs"

	datapath "github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
)

// Network is the sandboxes' network.
type Network struct {
	Overview *network.Overview // nil: it isn't up
	Findings []network.Finding // of the host, where it isn't up
	Err      error             // why it can't be looked at
}

// BPF is what the kernel runs programs by.
type BPF struct {
	TCX   bool            // or filters
	Err   error           // why it runs none
	Unfit *datapath.Unfit // why it doesn't run the datapath's
}

func lookAtNetwork(ctx context.Context, cfg *config.Config) (n Network) {
	n.Overview, n.Err = network.New(cfg).Overview(ctx)
	if busy := errors.Is(n.Err, context.DeadlineExceeded); busy || !errdefs.IsUnavailable(n.Err) {
		return n
	}
	var found []gateway.Finding
	found, n.Err = gateway.Check(ctx, cfg)
	for _, f := range found {
		n.Findings = append(n.Findings, network.Finding(f))
	}
	return n
}

// bpf loads a program that does nothing, and attaches it to a device that there can't be: the kernel looks for the device
// where it knows how to attach.
func bpf() BPF {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		License:      "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return BPF{Err: err}
	}
	defer p.Close()
	_, err = link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: p, Attach: ebpf.AttachTCXIngress})
	return BPF{TCX: !errors.Is(err, ebpf.ErrNotSupported), Unfit: datapath.CheckKernel()}
}

func judgeNetwork(cfg *config.Config, f Facts, add func(Level, string, string, string)) {
	switch {
	case f.BPF.Err != nil:
		add(Fail, "bpf", "programs can't be loaded: "+f.BPF.Err.Error(), "a kernel with CONFIG_BPF_SYSCALL, and root; sandboxes' packets go by such programs")
	case f.BPF.Unfit != nil:
		add(Fail, "bpf", f.BPF.Unfit.Lacks, f.BPF.Unfit.Remedy)
	case f.BPF.TCX:
		add(OK, "bpf", "programs can be loaded, and attached by TCX", "")
	default:
		add(OK, "bpf", "programs can be loaded, and attached as filters: the kernel has no TCX (6.6)", "")
	}
	if !f.Root {
		return // what is in force can't be seen
	}
	n := f.Network
	if n.Err != nil {
		add(Warn, "network", "it can't be looked at: "+n.Err.Error(), "try again")
		return
	}
	found := n.Findings
	if o := n.Overview; o != nil {
		found = o.Findings
		add(OK, "network", fmt.Sprintf("%s at %s with an MTU of %d, by %s, programs by %s; %d open, %d closed, %d taps ready",
			o.Device, o.Address, o.MTU, first(strings.Join(o.Uplink, " and "), "no uplink"), first(o.Hook, "nothing"), o.Open, o.Closed, o.Warm), "")
		if sandboxes := o.Open + o.Closed; sandboxes > 0 && f.Sockets.Up == 0 {
			add(Warn, "network", fmt.Sprintf("%d sandboxes are in it and no `cube up` runs: names can't be looked up, and nothing follows the host", sandboxes), "`cube up -d`")
		}
	} else if !slices.ContainsFunc(found, func(d network.Finding) bool { return d.Level != gateway.Hint }) {
		add(OK, "network", fmt.Sprintf("it isn't up: `cube up` sets it up, with the pool %s", cfg.Network.Pool), "")
	}
	for _, d := range found {
		add(levelOf(d.Level, f.Sockets.Up != 0), "network", d.Detail, d.Remedy)
	}
}

// levelOf is what a finding means for the stack. What is broken is the next `cube up`'s to repair.
func levelOf(l gateway.Level, runs bool) Level {
	if l == gateway.Blocked || l == gateway.Broken && runs {
		return Fail
	}
	return Warn
}
