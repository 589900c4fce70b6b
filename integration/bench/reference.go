package main

import "fmt"

// reference prints what TencentCloud/CubeSandbox has published of itself (report of 2026-06, v0.3), with its hardware. It has
// not been run here: KVM on 96 threads of its own and emulation on two shared ones can't be compared in absolute times.
func reference() error {
	fmt.Print(`
### The reference's own figures

TencentCloud/CubeSandbox v0.3, its report of 2026-06: bare metal, 2 Xeon 8255C (96 threads), 375 GiB, NVMe with XFS, Linux 6.6.119, KVM, 2 vCPU and
2 GiB a sandbox, page cache hot, one at a time; in brackets a virtual host (EPYC 9K65, 16 vCPU, 32 GiB, PVM).

| | ms |
| --- | --- |
| snapshot with 7 MB written; 121; 297; 603; 1136 | 46; 108; 174; 289; 487 [1136 MB: 258] |
| sandbox from a snapshot | 64 [67] |
| rollback, with a snapshot before it | 82 [90] |
| clone, with a snapshot before it | 220 [271] |
| pause; resume | 558; 42 [371; 19] |

Memory per idle sandbox, from ` + "`free`" + `: 21.5 MB at 100, 25.7 MB at 1000 [27 to 34]. Its snapshots aren't synced to the disk, and have no digests.
`)
	return nil
}
