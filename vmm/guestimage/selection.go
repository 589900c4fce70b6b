package guestimage

// bootModules are loaded by the agent, in this order and each after what it depends on, before it can talk to the host:
// the virtio transport, the agent's channel, disks, the root file system, the NIC, and what ends connections in a restored
// machine (CONFIG_INET_DIAG_DESTROY). What the kernel has built in is left out. The checksum modules stand first because others ask for them by way of modprobe, which has nothing to load from
// until the modules image is mounted.
var bootModules = []string{
	"crc32c_generic", "crct10dif_generic", "crc64_rocksoft_generic",
	"virtio_mmio", "virtio_console", "virtio_scsi", "sd_mod", "ext4", "overlay", "virtio_net", "af_packet",
	"tcp_diag",
}

// offered and offeredModules are what a workload may ask for, and are in the modules image with all that they depend on:
// file systems, networking, cryptography and virtual devices, but no hardware drivers. offered and withheld are prefixes
// of paths.
var offered = []string{
	"kernel/arch/x86/crypto/", "kernel/crypto/", "kernel/fs/", "kernel/lib/", "kernel/net/",
	"kernel/drivers/block/zram/", "kernel/drivers/md/", "kernel/drivers/net/bonding/", "kernel/drivers/net/ipvlan/",
	"kernel/drivers/net/ppp/", "kernel/drivers/net/team/", "kernel/drivers/net/vxlan/", "kernel/drivers/net/wireguard/",
}

var offeredModules = []string{
	"brd", "dummy", "geneve", "ifb", "loop", "macsec", "macvlan", "macvtap", "nbd", "netconsole", "nlmon", "null_blk",
	"tap", "tun", "veth", "virtio_blk", "virtio_net", "virtio_pci", "virtio-rng", "virtio_scsi", "vrf", "vsockmon",
}

// withheld needs hardware or a cluster that a machine doesn't have, or is so rarely used that its bugs are all that a
// workload would get from it: any program may have the kernel load a protocol or a file system by its name.
var withheld = []string{
	"kernel/fs/adfs/", "kernel/fs/affs/", "kernel/fs/afs/", "kernel/fs/befs/", "kernel/fs/bfs/", "kernel/fs/coda/",
	"kernel/fs/dlm/", "kernel/fs/efs/", "kernel/fs/freevxfs/", "kernel/fs/gfs2/", "kernel/fs/hpfs/", "kernel/fs/jffs2/",
	"kernel/fs/jfs/", "kernel/fs/minix/", "kernel/fs/nilfs2/", "kernel/fs/ocfs2/", "kernel/fs/omfs/",
	"kernel/fs/orangefs/", "kernel/fs/qnx4/", "kernel/fs/qnx6/", "kernel/fs/sysv/", "kernel/fs/ubifs/",
	"kernel/fs/ufs/", "kernel/fs/vboxsf/", "kernel/fs/zonefs/",
	"kernel/lib/test_", "kernel/crypto/tcrypt.ko",
	"kernel/net/appletalk/", "kernel/net/atm/", "kernel/net/ax25/", "kernel/net/batman-adv/", "kernel/net/bluetooth/",
	"kernel/net/can/", "kernel/net/dccp/", "kernel/net/ieee802154/", "kernel/net/kcm/", "kernel/net/lapb/",
	"kernel/net/mac80211/", "kernel/net/mac802154/", "kernel/net/netrom/", "kernel/net/nfc/", "kernel/net/phonet/",
	"kernel/net/qrtr/", "kernel/net/rds/", "kernel/net/rfkill/", "kernel/net/rose/", "kernel/net/rxrpc/",
	"kernel/net/smc/", "kernel/net/tipc/", "kernel/net/wireless/",
}
