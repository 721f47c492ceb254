/* The FileDescriptorSet of health and reflection, as protoc wrote it. */
    .section .rodata
    .global bt_rpc_protoset
    .hidden bt_rpc_protoset
    .global bt_rpc_protoset_end
    .hidden bt_rpc_protoset_end
bt_rpc_protoset:
    .incbin PROTOSET
bt_rpc_protoset_end:
    .byte 0
    .section .note.GNU-stack, "", %progbits
